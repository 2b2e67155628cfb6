// SPDX-License-Identifier: Apache-2.0
// Decoding of interleaved range asymmetric numeral systems: `codecs/ans.py` says how and is slower.

#include <cstdint>

extern "C" {

// Decodes `active[i]` lanes at step i, into `out` from each lane's `begin` on. `symbols` are the
// slots' of each table; `frequencies` and `starts` [tables, 256] its symbols'. Returns the words
// that were read, or -1 if there are too few.
int64_t decode_lanes(const uint16_t* words, int64_t count, uint32_t* states, const int64_t* active,
                     int64_t steps, const int64_t* table, const int64_t* begin,
                     const uint8_t* symbols, const uint32_t* frequencies, const uint32_t* starts,
                     int64_t bits, uint8_t* out) {
    const uint32_t mask = (uint32_t(1) << bits) - 1;
    int64_t taken = 0;
    for (int64_t step = 0; step < steps; step++)
        for (int64_t lane = 0; lane < active[step]; lane++) {
            const int64_t of = table[lane];
            const uint32_t state = states[lane], slot = state & mask;
            const uint8_t symbol = symbols[(of << bits) + slot];
            const uint32_t next = frequencies[of * 256 + symbol] * (state >> bits) + slot -
                                  starts[of * 256 + symbol];
            const bool low = next < 0x10000;
            if (low && taken == count) return -1;
            const uint32_t word = words[taken];  // one lies behind the last
            states[lane] = low ? next << 16 | word : next;
            taken += low;
            out[begin[lane] + step] = symbol;
        }
    return taken;
}
}
