// SPDX-License-Identifier: Apache-2.0
// Products of matrices of bytes, by instructions that add up four of them at once (AVX-512 VNNI).

#include <algorithm>
#include <cstdint>
#include <vector>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define BYTES_IN_VECTORS 1
#endif

namespace {

constexpr int64_t ROWS = 8, COLUMNS = 48;  // of the sums that stay in registers

#ifdef BYTES_IN_VECTORS
// Sums of ROWS rows and one panel of columns, over `fours` times four bytes.
__attribute__((target("avx512f,avx512bw,avx512vnni"))) void multiply_panel(
    const uint8_t* const* rows, const int8_t* panel, int64_t fours, int32_t (*sums)[COLUMNS]) {
    __m512i own[ROWS][3];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++) own[i][j] = _mm512_setzero_si512();
    for (int64_t k = 0; k < fours; k++) {
        __m512i columns[3];
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++)
            columns[j] = _mm512_loadu_si512(panel + (k * COLUMNS + 16 * j) * 4);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            int32_t four;
            __builtin_memcpy(&four, rows[i] + 4 * k, sizeof four);
            const __m512i row = _mm512_set1_epi32(four);
#pragma GCC unroll 3
            for (int j = 0; j < 3; j++) own[i][j] = _mm512_dpbusd_epi32(own[i][j], row, columns[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++) _mm512_storeu_si512(&sums[i][16 * j], own[i][j]);
}
#endif

}  // namespace

extern "C" {

// 1 if this CPU has the instructions.
int64_t can_multiply_bytes() {
#ifdef BYTES_IN_VECTORS
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");
#else
    return 0;
#endif
}

// out [n, p] = offsets [p] + scales [p] · products of rows [n, 4·fours], less `middle` each, and
// columns: panels [p / 48, fours, 48, 4], signed, with zeros behind the last column.
void multiply_bytes(const uint8_t* rows, const int8_t* panels, const float* scales,
                    const float* offsets, float* out, int64_t n, int64_t p, int64_t fours,
                    int64_t middle, int64_t threads) {
#ifdef BYTES_IN_VECTORS
    const std::vector<uint8_t> ones(fours * 4, 1);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t first = 0; first < p; first += COLUMNS) {
        const int8_t* panel = panels + first * fours * 4;
        const int64_t columns = std::min(COLUMNS, p - first);
        int32_t of_ones[ROWS][COLUMNS], sums[ROWS][COLUMNS];
        const uint8_t* own[ROWS];
        std::fill_n(own, ROWS, ones.data());
        multiply_panel(own, panel, fours, of_ones);
        for (int64_t i = 0; i < n; i += ROWS) {
            for (int64_t k = 0; k < ROWS; k++) own[k] = rows + std::min(i + k, n - 1) * fours * 4;
            multiply_panel(own, panel, fours, sums);
            for (int64_t k = 0; k < std::min(ROWS, n - i); k++)
                for (int64_t j = 0; j < columns; j++)
                    out[(i + k) * p + first + j] =
                        offsets[first + j] +
                        scales[first + j] * float(sums[k][j] - int32_t(middle) * of_ones[0][j]);
        }
    }
#endif
}
}
