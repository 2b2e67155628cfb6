// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 numbers, as wide as the CPU has them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

#ifdef __AVX512F__
constexpr int64_t WIDE = 16;  // numbers of a vector
#else
constexpr int64_t WIDE = 8;
#endif
constexpr float NOTHING = -std::numeric_limits<float>::infinity();  // log-sum-exp of no logits

typedef float Floats __attribute__((vector_size(4 * WIDE)));

typedef float Unaligned __attribute__((vector_size(4 * WIDE), aligned(4)));

Floats loaded(const float* row) { return *(const Unaligned*)row; }

void store(float* row, Floats numbers) { std::memcpy(row, &numbers, sizeof numbers); }

// Maxima are taken of vectors by hand: compilers leave them scalar, as one number may be NaN.
template <class Number>
Number higher(Number one, Number other) {
    return one > other ? one : other;
}

// The highest of `count` numbers and `most`.
float most_of(const float* row, int64_t count, float most) {
    Floats wide = Floats{} + most;
    int64_t i = 0;
    for (; i + WIDE <= count; i += WIDE) wide = higher(loaded(row + i), wide);
    for (int64_t j = 0; j < WIDE; j++) most = higher(wide[j], most);
    for (; i < count; i++) most = higher(row[i], most);
    return most;
}

float of_bits(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// Cephes' expf of numbers up to 0; 0 below −87. Without branches, so that loops become vectors.
inline __attribute__((always_inline)) float exponential(float x) {
    const float bounded = std::max(x, -87.0f);
    const float whole = std::floor(bounded * 1.44269504f + 0.5f);
    const float rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float series = 1.9875691500e-4f;
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    return x < -87.0f ? 0.0f : series * of_bits(uint32_t(int32_t(whole) + 127) << 23);
}

// Weights of logits, less `most` each; their sum.
float exponentials(const float* logits, int64_t count, float most, float* weights) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        weights[i] = exponential(logits[i] - most);
        sum += weights[i];
    }
    return sum;
}

}  // namespace
