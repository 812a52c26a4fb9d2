/* One step of Adam or AdamW over n elements (Kingma & Ba 2014, arXiv 1412.6980; Loshchilov & Hutter 2017, 1711.05101).

   One pass over memory, with one square root and one division an element: 28 bytes an element are read and written.

   decay: 1 - rate * decoupled weight decay       penalty: L2 penalty that is added to the gradient
   size: rate / (1 - beta1^t)                     scale: 1 / sqrt(1 - beta2^t)
   new1: 1 - beta1, new2: 1 - beta2, which lose four digits if they are computed here, in single precision.            */
#include <math.h>
#include <omp.h>
#include <stdint.h>

enum { LINE = 16, BLOCK = 64, AHEAD = 256 }; /* Elements: of a cache line, of a block, of what is announced ahead. */

#define STEP(i)                                                                                                        \
    do {                                                                                                               \
        const float g = gradient[i] + penalty * weight[i];                                                             \
        const float m = beta1 * mean[i] + new1 * g;                                                                    \
        const float v = beta2 * square[i] + new2 * g * g;                                                              \
        mean[i] = m;                                                                                                   \
        square[i] = v;                                                                                                 \
        weight[i] = decay * weight[i] - size * (m / (sqrtf(v) * scale + eps));                                         \
    } while (0)

/* A function of its own: in the region that threads share, a compiler reads the factors again for each vector. */
__attribute__((noinline)) static void update(float *restrict weight, const float *restrict gradient,
                                             float *restrict mean, float *restrict square, int64_t n, float beta1,
                                             float new1, float beta2, float new2, float decay, float penalty,
                                             float size, float scale, float eps)
{
    int64_t first = 0;
    for (; first + BLOCK <= n; first += BLOCK) {
        /* Lines are announced as ones to write: a line that is read first is fetched again for its store. Addresses
           past the end are harmless. */
        for (int j = 0; j < BLOCK; j += LINE) {
            __builtin_prefetch(gradient + first + AHEAD + j, 0);
            __builtin_prefetch(mean + first + AHEAD + j, 1);
            __builtin_prefetch(square + first + AHEAD + j, 1);
            __builtin_prefetch(weight + first + AHEAD + j, 1);
        }
        for (int j = 0; j < BLOCK; j++)
            STEP(first + j);
    }
    for (int64_t i = first; i < n; i++)
        STEP(i);
}

void adam_step(float *weight, const float *gradient, float *mean, float *square, int64_t n, int threads, float beta1,
               float new1, float beta2, float new2, float decay, float penalty, float size, float scale, float eps)
{
#pragma omp parallel num_threads(threads) if (threads > 1 && n > 65536)
    {
        const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
        const int64_t first = n * part / parts, last = n * (part + 1) / parts;
        update(weight + first, gradient + first, mean + first, square + first, last - first, beta1, new1, beta2, new2,
               decay, penalty, size, scale, eps);
    }
}
