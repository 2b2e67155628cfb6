// SPDX-License-Identifier: Apache-2.0
// Products of a few queries with rows of float32 numbers, and weighted sums of rows.
#pragma once

#include "vectors.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
__m128 sums_of_four(const __m512* vectors) {
    const __m512 pair = _mm512_add_ps(_mm512_unpacklo_ps(vectors[0], vectors[1]),
                                      _mm512_unpackhi_ps(vectors[0], vectors[1])),
                 other = _mm512_add_ps(_mm512_unpacklo_ps(vectors[2], vectors[3]),
                                       _mm512_unpackhi_ps(vectors[2], vectors[3])),
                 four = _mm512_add_ps(_mm512_shuffle_ps(pair, other, 0x44),
                                      _mm512_shuffle_ps(pair, other, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four),
                                      _mm512_extractf32x8_ps(four, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

// Products of G queries with `count` rows; those of a query lie `step` apart. Rows are read once.
template <int G>
void multiply(const float* queries, const float* rows, int64_t count, int64_t size,
              float* products, int64_t step) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 4 <= count && size % WIDE == 0; i += 4) {
        __m512 sums[G][4] = {};
        for (int64_t j = 0; j < size; j += WIDE) {
            __m512 own[4];
            for (int k = 0; k < 4; k++) own[k] = _mm512_loadu_ps(rows + (i + k) * size + j);
            for (int g = 0; g < G; g++) {
                const __m512 query = _mm512_loadu_ps(queries + g * size + j);
                for (int k = 0; k < 4; k++)
                    sums[g][k] = _mm512_fmadd_ps(query, own[k], sums[g][k]);
            }
        }
        for (int g = 0; g < G; g++) _mm_storeu_ps(products + g * step + i, sums_of_four(sums[g]));
    }
#endif
    for (; i < count; i++)
        for (int g = 0; g < G; g++) {
            float sum = 0;
            for (int64_t j = 0; j < size; j++) sum += queries[g * size + j] * rows[i * size + j];
            products[g * step + i] = sum;
        }
}

// Adds `count` rows to each of G sums, weighted by weights `step` apart. A few channels of all sums
// stay in registers.
template <int G>
void add_rows(const float* weights, int64_t step, const float* rows, int64_t count, int64_t size,
              float* sums) {
    constexpr int64_t VECTORS = 2;
    int64_t j = 0;
    for (; j + VECTORS * WIDE <= size; j += VECTORS * WIDE) {
        Floats own[G][VECTORS];
        for (int g = 0; g < G; g++)
            for (int k = 0; k < VECTORS; k++) own[g][k] = loaded(sums + g * size + j + k * WIDE);
        for (int64_t i = 0; i < count; i++) {
            const float* row = rows + i * size + j;
            for (int k = 0; k < VECTORS; k++) {
                const Floats part = loaded(row + k * WIDE);
                for (int g = 0; g < G; g++) own[g][k] += weights[g * step + i] * part;
            }
        }
        for (int g = 0; g < G; g++)
            for (int k = 0; k < VECTORS; k++) store(sums + g * size + j + k * WIDE, own[g][k]);
    }
    for (int64_t i = 0; i < count; i++)
        for (int g = 0; g < G; g++)
            for (int64_t k = j; k < size; k++)
                sums[g * size + k] += weights[g * step + i] * rows[i * size + k];
}

// Runs `run` for each few of a number of query heads: their first, and how many as a constant.
template <class Run>
void in_fews(int64_t count, Run run) {
    int64_t first = 0;
    for (; first + 4 <= count; first += 4) run(first, std::integral_constant<int, 4>{});
    if (count - first == 3) run(first, std::integral_constant<int, 3>{});
    if (count - first == 2) run(first, std::integral_constant<int, 2>{});
    if (count - first == 1) run(first, std::integral_constant<int, 1>{});
}

}  // namespace
