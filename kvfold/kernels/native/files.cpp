// SPDX-License-Identifier: Apache-2.0
// Rows of a file that are read where they lie.

#include <atomic>
#include <cerrno>
#include <cstdint>
#ifndef _WIN32
#include <unistd.h>
#endif

extern "C" {

// 0 if `count` rows of `size` bytes were read into `out` from their offsets, 1 if one was not whole.
int64_t read_rows(int64_t descriptor, const int64_t* offsets, uint8_t* out, int64_t count,
                  int64_t size, int64_t threads) {
    std::atomic<int64_t> missing{0};
#ifndef _WIN32
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; i++)
        for (int64_t done = 0; done < size && !missing;) {
            const ssize_t now = pread(int(descriptor), out + i * size + done, size - done,
                                      off_t(offsets[i] + done));
            if (now > 0)
                done += now;
            else if (now == 0 || errno != EINTR)
                missing = 1;
        }
#endif
    return missing;
}
}
