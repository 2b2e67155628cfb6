// SPDX-License-Identifier: Apache-2.0
// Decode attention over raw float32 entries that returns its weights, one query for each query head.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "rows.h"

namespace {

constexpr int64_t TILE = 32;  // entries, whose keys stay in the L1 cache for all queries

// Keys or values [B, H, T, ·], whose rows follow one another in a head.
struct Heads {
    const float* numbers;
    int64_t of_batch, of_head;  // numbers from one to the next

    const float* at(int64_t row, int64_t head) const {
        return numbers + row * of_batch + head * of_head;
    }
};

// Softmax of a query's logits, in place.
void weigh(float* own, int64_t count, const float* hidden) {
    if (hidden)
        for (int64_t i = 0; i < count; i++) own[i] += hidden[i];
    const float share = 1 / exponentials(own, count, most_of(own, count, NOTHING), own);
    for (int64_t i = 0; i < count; i++) own[i] *= share;
}

}  // namespace

extern "C" {

// query [B, H, G, D] → out [B, H, G, Dv] and weights [B, H, G, T]. If there are products [B, H, T],
// they are those of all keys with the one at `slot`. `hidden` is added to both; a head's begins
// `hidden_step` numbers behind the last one's, a query's `hidden_of_query`.
void attend_with_row(const float* query, const float* key, int64_t key_batch, int64_t key_head,
                     const float* value, int64_t value_batch, int64_t value_head,
                     const float* hidden, int64_t hidden_step, int64_t hidden_of_query,
                     int64_t slot, float* out, float* weights, float* products, int64_t batch,
                     int64_t heads, int64_t groups, int64_t stored, int64_t size,
                     int64_t value_size, float scale, int64_t threads) {
    const Heads keys{key, key_batch, key_head}, values{value, value_batch, value_head};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t item = 0; item < batch * heads; item++) {
        const float *own_keys = keys.at(item / heads, item % heads),
                    *own_values = values.at(item / heads, item % heads),
                    *own_hidden = hidden ? hidden + item * hidden_step : nullptr;
        float *row = weights + item * groups * stored, *mixed = out + item * groups * value_size,
              *beside = products ? products + item * stored : nullptr;
        std::vector<float> asked(query + item * groups * size, query + (item + 1) * groups * size);
        for (float& number : asked) number *= scale;
        for (int64_t first = 0; first < stored; first += TILE) {
            const int64_t count = std::min(TILE, stored - first);
            const float* tile = own_keys + first * size;
            in_fews(groups, [&](int64_t g, auto few) {
                multiply<few>(&asked[g * size], tile, count, size, row + g * stored + first, stored);
            });
            if (beside)
                multiply<1>(own_keys + slot * size, tile, count, size, beside + first, stored);
        }
        if (beside && own_hidden)
            for (int64_t i = 0; i < stored; i++) beside[i] += own_hidden[i];
        for (int64_t g = 0; g < groups; g++)
            weigh(row + g * stored, stored, own_hidden ? own_hidden + g * hidden_of_query : nullptr);
        std::fill_n(mixed, groups * value_size, 0.0f);
        for (int64_t first = 0; first < stored; first += TILE) {
            const int64_t count = std::min(TILE, stored - first);
            in_fews(groups, [&](int64_t g, auto few) {
                add_rows<few>(row + g * stored + first, stored, own_values + first * value_size, count,
                              value_size, mixed + g * value_size);
            });
        }
    }
}
}
