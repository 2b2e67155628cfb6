// SPDX-License-Identifier: Apache-2.0
// Decode attention over raw and over quantized entries. A tile of these is decoded at a time, and
// stays in the L1 cache. Layouts are those of `kernels/packing.py` and `kernels/codebook.py`.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "rows.h"

namespace {

constexpr int64_t TILE = 32;  // entries
constexpr int64_t PIECE = 48, ROW = (int64_t(1) << PIECE) - 1;  // of a raw row's number
constexpr int64_t APART = 16;  // entries between those of a sample of logits

typedef int32_t Codes __attribute__((vector_size(4 * WIDE)));

struct Half {
    uint16_t bits;

    // Exponents are moved into float32's place, then scaled by the difference of the biases.
    operator float() const {
        const uint32_t moved = uint32_t(bits & 0x7fff) << 13;
        const bool finite = moved < 0x7c00 << 13;
        const float magnitude = finite ? of_bits(moved) * 0x1p112f : of_bits(moved | 0x7f800000);
        return bits >> 15 ? -magnitude : magnitude;
    }
};

struct BFloat16 {
    uint16_t bits;

    operator float() const { return of_bits(uint32_t(bits) << 16); }
};

Codes widened(const uint8_t* bytes) {
#if defined __AVX512F__
    return (Codes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
#elif defined __AVX2__
    return (Codes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
#else
    uint8_t own __attribute__((vector_size(WIDE)));
    std::memcpy(&own, bytes, sizeof own);
    return __builtin_convertvector(own, Codes);
#endif
}

// Codes from the one numbered `first` on, in words, the lowest first; as many words are read.
template <int BITS>
Codes consecutive(const int32_t* words, int64_t first) {
    const int start = first * BITS % 32;
    Codes owner, shifts, found;
    for (int i = 0; i < WIDE; i++) {
        owner[i] = (start + i * BITS) / 32;
        shifts[i] = (start + i * BITS) % 32;
    }
    words += first * BITS / 32;
#ifdef __AVX512F__
    found = (Codes)_mm512_permutexvar_epi32((__m512i)owner, _mm512_loadu_si512(words));
#else
    for (int i = 0; i < WIDE; i++) found[i] = words[owner[i]];
#endif
    return found >> shifts & ((1 << BITS) - 1);
}

// Numbers that codes stand for: of a table, themselves, or FP8 (e4m3).

struct Table {
    float numbers[16];

    Floats operator()(Codes codes) const {
#if defined __AVX512F__
        return (Floats)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(numbers));
#elif defined __AVX2__
        const __m256i at = (__m256i)codes;  // the fourth bit, as a sign, chooses the half
        return (Floats)_mm256_blendv_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers), at),
                                        _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8), at),
                                        _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
        Floats found;
        for (int i = 0; i < WIDE; i++) found[i] = numbers[codes[i]];
        return found;
#endif
    }
};

struct Integers {
    Floats operator()(Codes codes) const { return __builtin_convertvector(codes, Floats); }
};

struct Float8 {
    Floats operator()(Codes codes) const {
        const Codes magnitudes = (codes & 0x7f) << 20, signs = (codes & 0x80) << 24;
        return (Floats)((Codes)((Floats)magnitudes * 0x1p120f) | signs);
    }
};

// Numbers of an entry whose codes lie in runs (`codebook.packed`). A run's last vector may go on
// behind its end, in `packed` and in `row`: the next run overwrites what it leaves there.
template <int BITS, class Numbers>
void decode_runs(const uint8_t* packed, int64_t size, Numbers numbers, float* row) {
    const int64_t run = size * BITS / 8;
#pragma GCC unroll 4
    for (int i = 0; i < 8 / BITS; i++)
        for (int64_t j = 0; j < run; j += WIDE) {
            const Codes codes = widened(packed + j) >> i * BITS & ((1 << BITS) - 1);
            store(row + i * run + j, numbers(codes));
        }
}

// The plane's bytes, and again with each bit a place lower; both may be followed by others.
void double_plane(const uint8_t* plane, int64_t bytes, uint8_t* both) {
    for (int shift = 0; shift < 2; shift++)
        for (int64_t j = 0; j < bytes; j += 8) {
            uint64_t eight;
            std::memcpy(&eight, plane + j, sizeof eight);
            eight >>= shift;  // no bit that comes from the next byte is looked at
            std::memcpy(both + shift * bytes + j, &eight, sizeof eight);
        }
}

// As `decode_runs`, of 3 bits: two lie in `packed`, the third in the two lowest bits of `high`.
template <class Numbers>
void decode_planes(const uint8_t* packed, const uint8_t* high, int64_t size, Numbers numbers,
                   float* row) {
    const int64_t run = size / 4;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        for (int64_t j = 0; j < run; j += WIDE) {
            const Codes low = widened(packed + j) >> 2 * i & 3;
            store(row + i * run + j, numbers(low | (widened(high + j) >> 2 * i & 1) << 2));
        }
}

// Calls `run` with the number of bits as a constant.
template <class Run>
void with_bits(int64_t bits, Run run) {
    if (bits == 1) run(std::integral_constant<int, 1>{});
    if (bits == 2) run(std::integral_constant<int, 2>{});
    if (bits == 3) run(std::integral_constant<int, 3>{});
    if (bits == 4) run(std::integral_constant<int, 4>{});
    if (bits == 8) run(std::integral_constant<int, 8>{});
}

// Entries, row after row: their numbers times a factor, plus an offset. Vectors may go on behind
// the end.
struct Tile {
    std::vector<float> numbers, factors, offsets;
    std::vector<uint8_t> packed, high;
    const float* rows;  // the numbers; of raw float32 entries these where they lie

    explicit Tile(int64_t size)
        : numbers(TILE * size + WIDE), factors(TILE, 1.0f), offsets(TILE), packed(TILE * size + 4 * WIDE),
          high(TILE * size / 4 + WIDE), rows(numbers.data()) {}

    const uint8_t* copied(const void* codes, int64_t bytes) {
        std::memcpy(packed.data(), codes, bytes);
        for (int64_t j = 0; j < bytes; j += 64)
            __builtin_prefetch((const uint8_t*)codes + bytes + j);
        return packed.data();
    }

    template <class Numbers>
    void decode(const uint8_t* codes, int64_t bits, int64_t count, int64_t size,
                Numbers meaning) {
        const int64_t width = size * bits / 8, run = size / 4;
        const uint8_t* own = copied(codes, count * width);
        if (bits == 3)  // of all entries first: a read right behind the write would wait for it
            for (int64_t i = 0; i < count; i++)
                double_plane(own + i * width + run, size / 8, &high[i * run]);
        with_bits(bits, [&](auto constant) {
            for (int64_t i = 0; i < count; i++) {
                const uint8_t* entry = own + i * width;
                float* row = &numbers[i * size];
                if constexpr (constant == 3)
                    decode_planes(entry, &high[i * run], size, meaning, row);
                else
                    decode_runs<constant>(entry, size, meaning, row);
            }
        });
    }
};

// Keys and values below decode `count` entries from entry `first` of all segments on into a tile.

struct TokenKeys {
    const uint8_t* codes;
    const Half* scales;
    Table table;
    int64_t bits, size;

    void decode(int64_t first, int64_t count, Tile& tile) const {
        const uint8_t* own = codes + first * size * bits / 8;
        if (bits == 8)
            tile.decode(own, bits, count, size, Float8{});
        else
            tile.decode(own, bits, count, size, table);
        for (int64_t i = 0; i < count; i++) tile.factors[i] = scales[first + i];
    }
};

struct TokenValues {
    const uint8_t* codes;
    const Half* scales;  // and minima, in turns
    int64_t bits, size;

    void decode(int64_t first, int64_t count, Tile& tile) const {
        tile.decode(codes + first * size * bits / 8, bits, count, size, Integers{});
        for (int64_t i = 0; i < count; i++) {
            tile.factors[i] = scales[2 * (first + i)];
            tile.offsets[i] = scales[2 * (first + i) + 1];
        }
    }
};

// Raw keys or values, each where its number in `at` says: a piece, and its row there.
template <class Number>
struct RawRows {
    const Number* pieces[3];
    const int64_t* at;
    int64_t size;

    void decode(int64_t first, int64_t count, Tile& tile) const {
        for (int64_t i = 0; i < count; i++) {
            const Number* row = pieces[at[first + i] >> PIECE] + (at[first + i] & ROW) * size;
            for (int64_t j = 0; j < size; j++) tile.numbers[i * size + j] = row[j];
            tile.factors[i] = 1.0f;
            tile.offsets[i] = 0.0f;
        }
    }
};

// Raw keys or values in two pieces, of which the second one begins at row `split` of both.
template <class Number>
struct RawPieces {
    const Number *old, *newest;
    int64_t split, size;

    void decode(int64_t first, int64_t count, Tile& tile) const {
        const Number* own = first < split ? old + first * size : newest + (first - split) * size;
        const int64_t bytes = count * size * sizeof(Number);
        for (int64_t j = 0; j < bytes; j += 64) __builtin_prefetch((const char*)own + bytes + j, 0, 2);
        if constexpr (std::is_same_v<Number, float>)
            tile.rows = own;
        else
            for (int64_t j = 0; j < count * size; j++) tile.numbers[j] = own[j];
    }
};

// A word holds codes of consecutive entries, of one channel.
template <class Number>
struct PackedKeys {
    const int32_t* words;
    const Number *scales, *minima;
    int64_t bits, group, size;

    void decode(int64_t first, int64_t count, Tile& tile) const {
        const int64_t in_word = 32 / bits;
        const int32_t mask = (1 << bits) - 1;
        for (int64_t i = 0; i < count; i++) {
            const int64_t entry = first + i, shift = entry % in_word * bits;
            const int32_t* row = words + entry / in_word * size;
            const Number *scale = scales + entry / group * size,
                         *minimum = minima + entry / group * size;
            float* numbers = &tile.numbers[i * size];
            for (int64_t j = 0; j < size; j++)
                numbers[j] = (row[j] >> shift & mask) * float(scale[j]) + float(minimum[j]);
            tile.factors[i] = 1.0f;
        }
    }
};

// A word holds codes of consecutive channels, of one entry.
template <class Number>
struct PackedValues {
    const int32_t* words;
    const Number *scales, *minima;
    int64_t bits, group, size;

    void decode(int64_t first, int64_t count, Tile& tile) const {
        const int64_t groups = size / group;
        const auto* own = (const int32_t*)tile.copied(words + first * size * bits / 32,
                                                      count * size * bits / 8);
        std::fill_n(tile.factors.begin(), count, 1.0f);
        with_bits(bits, [&](auto constant) {
            for (int64_t g = 0; g < count * groups; g++) {
                const float scale = scales[first * groups + g], low = minima[first * groups + g];
                float* row = &tile.numbers[g * group];
                // A group's last vector may go on into the next group, which overwrites it.
                for (int64_t j = 0; j < group; j += WIDE) {
                    const Codes codes = consecutive<constant>(own, g * group + j);
                    store(row + j, __builtin_convertvector(codes, Floats) * scale + low);
                }
            }
        });
    }
};

// The hyperbolic tangent.
inline __attribute__((always_inline)) float tangent(float x) {
    const float small = exponential(-2 * std::abs(x));
    return std::copysign((1 - small) / (1 + small), x);
}

struct Logits {
    float scale, softcap;  // softcap 0: none

    void operator()(float* products, int64_t count) const {
        for (int64_t i = 0; i < count; i++) products[i] *= scale;
        if (softcap > 0)
            for (int64_t i = 0; i < count; i++)
                products[i] = softcap * tangent(products[i] / softcap);
    }
};

// Keys or values of any kind: attention, which is long to compile, is compiled once for all of them.
struct Rows {
    int64_t size;
    std::function<void(int64_t, int64_t, Tile&)> decode;

    template <class Kind>
    Rows(const Kind& kind)
        : size(kind.size), decode([&kind](int64_t first, int64_t count, Tile& tile) {
              kind.decode(first, count, tile);
          }) {}
};

// Attention of a group's queries to `count` entries, by online softmax.
void attend_to_part(const float* query, int64_t groups, const Rows& keys, const Rows& values,
                    int64_t key_first, int64_t value_first, int64_t count, Logits logits,
                    float* mixed, float* lse) {
    Tile tile(std::max(keys.size, values.size));
    std::vector<float> weights(groups * TILE), most(groups, NOTHING), total(groups);
    std::fill_n(mixed, groups * values.size, 0.0f);
    for (int64_t done = 0; done < count; done += TILE) {
        const int64_t now = std::min(TILE, count - done);
        keys.decode(key_first + done, now, tile);
        in_fews(groups, [&](int64_t g, auto few) {
            multiply<few>(query + g * keys.size, tile.rows, now, keys.size, &weights[g * TILE], TILE);
        });
        for (int64_t g = 0; g < groups; g++) {
            float* own = &weights[g * TILE];
            for (int64_t i = 0; i < now; i++) own[i] *= tile.factors[i];
            logits(own, now);
            const float highest = most_of(own, now, most[g]);
            const float fade = exponential(most[g] - highest);
            float sum = total[g] * fade;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < now; i++) {
                own[i] = exponential(own[i] - highest);
                sum += own[i];
            }
            total[g] = sum;
            most[g] = highest;
            for (int64_t j = 0; j < values.size; j++) mixed[g * values.size + j] *= fade;
        }
        values.decode(value_first + done, now, tile);
        for (int64_t g = 0; g < groups; g++) {
            float *own = &weights[g * TILE], *sums = mixed + g * values.size, offset = 0;
            for (int64_t i = 0; i < now; i++) {
                offset += own[i] * tile.offsets[i];
                own[i] *= tile.factors[i];
            }
            for (int64_t j = 0; j < values.size; j++) sums[j] += offset;
        }
        in_fews(groups, [&](int64_t g, auto few) {
            add_rows<few>(&weights[g * TILE], TILE, tile.rows, now, values.size,
                          mixed + g * values.size);
        });
    }
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t j = 0; j < values.size; j++) mixed[g * values.size + j] /= total[g];
        lse[g] = most[g] + std::log(total[g]);
    }
}

// R segments, of `lengths` entries each, and where their keys and their values begin.
struct Segments {
    const int64_t *key_starts, *value_starts, *lengths;
    int64_t count, groups;
};

// Parts are cut at `part_size` entries whatever the number of threads, on which no result depends.
void attend(const float* query, const Segments& segments, const Rows& keys, const Rows& values,
            Logits logits, int64_t part_size, int64_t threads, float* out, float* lse) {
    std::vector<int64_t> first{0}, owner;
    for (int64_t s = 0; s < segments.count; s++) {
        const int64_t parts = (segments.lengths[s] + part_size - 1) / part_size;
        first.push_back(first.back() + parts);
        owner.insert(owner.end(), parts, s);
    }
    const int64_t groups = segments.groups, items = first.back(), width = groups * values.size;
    std::vector<float> outs(items * width), totals(items * groups);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t item = 0; item < items; item++) {
        const int64_t s = owner[item], begin = (item - first[s]) * part_size;
        attend_to_part(query + s * groups * keys.size, groups, keys, values,
                       segments.key_starts[s] + begin, segments.value_starts[s] + begin,
                       std::min(part_size, segments.lengths[s] - begin), logits,
                       &outs[item * width], &totals[item * groups]);
    }
    std::fill_n(out, segments.count * width, 0.0f);
    for (int64_t s = 0; s < segments.count; s++)
        for (int64_t g = 0; g < groups; g++) {
            float highest = NOTHING, total = 0, *own = out + s * width + g * values.size;
            for (int64_t item = first[s]; item < first[s + 1]; item++)
                highest = std::max(highest, totals[item * groups + g]);
            for (int64_t item = first[s]; item < first[s + 1]; item++)
                total += std::exp(totals[item * groups + g] - highest);
            lse[s * groups + g] = highest + std::log(total);
            for (int64_t item = first[s]; item < first[s + 1]; item++) {
                const float weight = std::exp(totals[item * groups + g] - highest) / total;
                for (int64_t j = 0; j < values.size; j++)
                    own[j] += weight * outs[item * width + g * values.size + j];
            }
        }
}

// A number whose order as an integer is that of the logit.
uint32_t ordered(float logit) {
    const float same = logit + 0.0f;  // of both zeros one
    uint32_t bits;
    std::memcpy(&bits, &same, sizeof bits);
    return bits ^ (bits >> 31 ? 0xffffffff : 0x80000000);
}

// Places of the `most` highest of `count` logits, ascending; the lowest of equal ones. A sample tells
// from where on to look, with twice as many above as are wanted.
void highest(const float* logits, int64_t count, int64_t most, int64_t* places) {
    if (most == 0) return;
    std::vector<uint32_t> keys(count), some;
    for (int64_t i = 0; i < count; i++) keys[i] = ordered(logits[i]);
    for (int64_t i = 0; i < count; i += APART) some.push_back(keys[i]);
    const size_t rank = 2 * most / APART + 8;
    uint32_t bound = 0;
    if (rank < some.size()) {
        std::nth_element(some.begin(), some.begin() + rank, some.end(), std::greater<>());
        bound = some[rank];
    }
    std::vector<int32_t> found(count);
    int64_t number = 0;
    const auto look = [&] {
        number = 0;
        for (int64_t i = 0; i < count; i++) {
            found[number] = i;
            number += keys[i] >= bound;
        }
    };
    look();
    if (number < most) {
        bound = 0;
        look();
    }
    some.resize(number);
    for (int64_t i = 0; i < number; i++) some[i] = keys[found[i]];
    std::nth_element(some.begin(), some.begin() + (most - 1), some.end(), std::greater<>());
    const uint32_t last = some[most - 1];
    int64_t equal = most;
    for (int64_t i = 0; i < most - 1; i++) equal -= some[i] > last;
    for (int64_t i = 0; i < number; i++) {
        const uint32_t key = keys[found[i]];
        if (key > last || (key == last && equal-- > 0)) *places++ = found[i];
    }
}

#ifdef __AVX512F__
// `logits` of `count` entries, or what is there if it is higher. Four entries are decoded in registers
// for QUERIES at a time; bits above a code's own choose the same number.
template <int BITS, int QUERIES>
void raise_logits(const float* query, const uint8_t* codes, const Half* scales, __m512 numbers,
                  int64_t count, int64_t size, float* logits) {
    const int64_t run = size * BITS / 8;
    for (int64_t i = 0; i < count; i += 4) {
        __m512 sums[QUERIES][4] = {};
        for (int64_t j = 0; j < run; j += WIDE) {
            Codes own[4];
            for (int k = 0; k < 4; k++) own[k] = widened(codes + (i + k) * run + j);
#pragma GCC unroll 8
            for (int r = 0; r < 8 / BITS; r++)
                for (int k = 0; k < 4; k++) {
                    const __m512 row = _mm512_permutexvar_ps((__m512i)(own[k] >> r * BITS), numbers);
                    for (int q = 0; q < QUERIES; q++)
                        sums[q][k] = _mm512_fmadd_ps(
                            row, _mm512_loadu_ps(query + q * size + r * run + j), sums[q][k]);
                }
        }
        const __m128 factors = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)(scales + i)));
        __m128 most = _mm_loadu_ps(logits + i);
        for (int q = 0; q < QUERIES; q++)
            most = _mm_max_ps(most, _mm_mul_ps(sums_of_four(sums[q]), factors));
        _mm_storeu_ps(logits + i, most);
    }
}

// As `products_of_codes`; false where a code's bits do not let it.
bool in_registers(const float* query, int64_t groups, const TokenKeys& keys, int64_t first,
                  int64_t count, float* logits) {
    const int64_t run = keys.size * keys.bits / 8, last = count % 4;
    if (keys.bits == 3 || keys.bits == 8 || run % WIDE) return false;
    const uint8_t* codes = keys.codes + first * run;
    std::vector<uint8_t> end(4 * run);
    std::memcpy(end.data(), codes + (count - last) * run, last * run);
    Half factors[4] = {};
    std::memcpy(factors, keys.scales + first + count - last, last * sizeof(Half));
    float of_end[4] = {NOTHING, NOTHING, NOTHING, NOTHING};
    std::fill_n(logits, count, NOTHING);
    with_bits(keys.bits, [&](auto bits) {
        if constexpr (bits != 3 && bits != 8) {
            Floats numbers;
            for (int i = 0; i < WIDE; i++) numbers[i] = keys.table.numbers[i % (1 << bits)];
            const auto take = [&](auto queries, int64_t g) {
                const float* own = query + g * keys.size;
                raise_logits<bits, queries>(own, codes, keys.scales + first, (__m512)numbers,
                                            count - last, keys.size, logits);
                raise_logits<bits, queries>(own, end.data(), factors, (__m512)numbers, last ? 4 : 0,
                                            keys.size, of_end);
            };
            int64_t g = 0;
            for (; g + 2 <= groups; g += 2) take(std::integral_constant<int, 2>{}, g);
            if (g < groups) take(std::integral_constant<int, 1>{}, g);
        }
    });
    std::copy_n(of_end, last, logits + count - last);
    return true;
}
#endif

// Highest product of an entry's code with any of a group's queries.
void products_of_codes(const float* query, int64_t groups, const TokenKeys& keys, int64_t first,
                       int64_t count, float* logits) {
#ifdef __AVX512F__
    if (in_registers(query, groups, keys, first, count, logits)) return;
#endif
    Tile tile(keys.size);
    float own[TILE];
    for (int64_t done = 0; done < count; done += TILE) {
        const int64_t now = std::min(TILE, count - done);
        keys.decode(first + done, now, tile);
        for (int64_t g = 0; g < groups; g++) {
            multiply<1>(query + g * keys.size, tile.rows, now, keys.size, own, TILE);
            for (int64_t i = 0; i < now; i++) {
                const float logit = own[i] * tile.factors[i];
                logits[done + i] = g ? std::max(logits[done + i], logit) : logit;
            }
        }
    }
}

}  // namespace

extern "C" {

// at [sum of hot and counts]: rows that the query [R, G, D], rotated as keys are, reads of each
// segment: its hot ones, in piece 2, then `counts` of `lengths` by their codes, in piece 0 of which
// it has `old` rows, or in piece 1. `places` of the hot ones are among these lengths.
void find_cold(const float* query, const uint8_t* codes, const void* scales, const float* table,
               const int64_t* starts, const int64_t* lengths, const int64_t* hot_starts,
               const int64_t* hot_lengths, const int64_t* places, const int64_t* counts,
               const int64_t* old_starts, const int64_t* old, const int64_t* new_starts,
               const int64_t* at_starts, int64_t* at, int64_t segments, int64_t groups, int64_t size,
               int64_t bits, int64_t part_size, int64_t threads) {
    TokenKeys keys{codes, (const Half*)scales, {}, bits, size};
    std::memcpy(&keys.table, table, sizeof keys.table);
    std::vector<float> logits(starts[segments - 1] + lengths[segments - 1]);
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (int64_t s = 0; s < segments; s++)
        for (int64_t begin = 0; begin < lengths[s]; begin += part_size) parts.push_back({s, begin});
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (size_t item = 0; item < parts.size(); item++) {
        const auto [s, begin] = parts[item];
        products_of_codes(query + s * groups * size, groups, keys, starts[s] + begin,
                          std::min(part_size, lengths[s] - begin), &logits[starts[s] + begin]);
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t s = 0; s < segments; s++) {
        float* own = logits.data() + starts[s];
        int64_t* found = at + at_starts[s];
        for (int64_t i = 0; i < hot_lengths[s]; i++) {
            own[places[hot_starts[s] + i]] = NOTHING;
            *found++ = (int64_t(2) << PIECE) + hot_starts[s] + i;
        }
        highest(own, lengths[s], counts[s], found);
        for (int64_t i = 0; i < counts[s]; i++)
            found[i] = found[i] < old[s] ? old_starts[s] + found[i]
                                         : (int64_t(1) << PIECE) + new_starts[s] + found[i] - old[s];
    }
}

// As below, of raw rows of three pieces at `at`; `number`: 0 float32, 1 float16, 2 bfloat16.
void attend_to_rows(const float* query, const void* key_old, const void* key_new,
                    const void* key_hot, const void* value_old, const void* value_new,
                    const void* value_hot, const int64_t* at, const int64_t* starts,
                    const int64_t* lengths, float* out, float* lse, int64_t number,
                    int64_t segments, int64_t groups, int64_t size, int64_t value_size, float scale,
                    float softcap, int64_t part_size, int64_t threads) {
    const auto run = [&](auto zero) {
        using N = decltype(zero);
        const RawRows<N> keys{{(const N*)key_old, (const N*)key_new, (const N*)key_hot}, at, size},
            values{{(const N*)value_old, (const N*)value_new, (const N*)value_hot}, at, value_size};
        attend(query, {starts, starts, lengths, segments, groups}, keys, values, {scale, softcap},
               part_size, threads, out, lse);
    };
    if (number == 0) run(float{});
    if (number == 1) run(Half{});
    if (number == 2) run(BFloat16{});
}

// As below, of raw entries: R segments in one piece, then the last of `slots` each in tails, of which
// segment i has all but the first gaps[i]. Tails begin `room` rows apart.
void attend_to_raw(const float* query, const void* key_old, const void* value_old,
                   const int64_t* starts, const int64_t* lengths, const void* key_tail,
                   const void* value_tail, const int64_t* gaps, float* out, float* lse,
                   int64_t number, int64_t segments, int64_t groups, int64_t size,
                   int64_t value_size, int64_t key_room, int64_t value_room, int64_t slots,
                   float scale, float softcap, int64_t part_size, int64_t threads) {
    const int64_t split = starts[segments - 1] + lengths[segments - 1], width = groups * value_size;
    std::vector<int64_t> of_keys, of_values, counts;
    std::vector<float> asked(2 * segments * groups * size), outs(2 * segments * width),
        totals(2 * segments * groups);
    for (int64_t s = 0; s < segments; s++) {
        of_keys.insert(of_keys.end(), {starts[s], split + s * key_room + gaps[s]});
        of_values.insert(of_values.end(), {starts[s], split + s * value_room + gaps[s]});
        counts.insert(counts.end(), {lengths[s], slots - gaps[s]});
        for (int half = 0; half < 2; half++)
            std::copy_n(query + s * groups * size, groups * size, &asked[(2 * s + half) * groups * size]);
    }
    const auto run = [&](auto zero) {
        using N = decltype(zero);
        const RawPieces<N> keys{(const N*)key_old, (const N*)key_tail, split, size},
            values{(const N*)value_old, (const N*)value_tail, split, value_size};
        attend(asked.data(), {of_keys.data(), of_values.data(), counts.data(), 2 * segments, groups},
               keys, values, {scale, softcap}, part_size, threads, outs.data(), totals.data());
    };
    if (number == 0) run(float{});
    if (number == 1) run(Half{});
    if (number == 2) run(BFloat16{});
    for (int64_t s = 0; s < segments; s++)
        for (int64_t g = 0; g < groups; g++) {
            const float *a = &totals[2 * s * groups + g], *b = a + groups;
            const float most = std::max(*a, *b), of_a = std::exp(*a - most), of_b = std::exp(*b - most);
            const float *first = &outs[2 * s * width + g * value_size], *second = first + width;
            lse[s * groups + g] = most + std::log(of_a + of_b);
            for (int64_t j = 0; j < value_size; j++)
                out[s * width + g * value_size + j] = (of_a * first[j] + of_b * second[j]) / (of_a + of_b);
        }
}

// query [R, G, D], rotated as the keys are; out [R, G, Dv] and lse [R, G].
void attend_to_per_token(const float* query, const uint8_t* key_codes, const void* key_scales,
                         const float* table, const uint8_t* value_codes, const void* value_scales,
                         const int64_t* starts, const int64_t* lengths, float* out, float* lse,
                         int64_t segments, int64_t groups, int64_t size, int64_t value_size,
                         int64_t key_bits, int64_t value_bits, float scale, float softcap,
                         int64_t part_size, int64_t threads) {
    TokenKeys keys{key_codes, (const Half*)key_scales, {}, key_bits, size};
    std::memcpy(&keys.table, table, sizeof keys.table);
    const TokenValues values{value_codes, (const Half*)value_scales, value_bits, value_size};
    attend(query, {starts, starts, lengths, segments, groups}, keys, values, {scale, softcap},
           part_size, threads, out, lse);
}

// As above, of packed keys and values; `number`: 0 float32, 1 float16, 2 bfloat16.
void attend_to_packed(const float* query, const int32_t* key_words, const void* key_scales,
                      const void* key_minima, const int32_t* value_words, const void* value_scales,
                      const void* value_minima, const int64_t* key_starts,
                      const int64_t* value_starts, const int64_t* lengths, float* out, float* lse,
                      int64_t number, int64_t segments, int64_t groups, int64_t size,
                      int64_t value_size, int64_t key_bits, int64_t value_bits, int64_t key_group,
                      int64_t value_group, float scale, float softcap, int64_t part_size,
                      int64_t threads) {
    const auto run = [&](auto zero) {
        using Number = decltype(zero);
        const PackedKeys<Number> keys{key_words,          (const Number*)key_scales,
                                      (const Number*)key_minima, key_bits, key_group, size};
        const PackedValues<Number> values{value_words,          (const Number*)value_scales,
                                          (const Number*)value_minima, value_bits, value_group,
                                          value_size};
        attend(query, {key_starts, value_starts, lengths, segments, groups}, keys, values,
               {scale, softcap}, part_size, threads, out, lse);
    };
    if (number == 0) run(float{});
    if (number == 1) run(Half{});
    if (number == 2) run(BFloat16{});
}
}
