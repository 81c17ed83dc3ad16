// A pass that does nothing but move memory, with the reads and writes of an AdamW update: 14 bytes in, 14 bytes out.

#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { MAX_THREADS = 256 };

typedef struct {
    float *weight, *mean, *square;
    const uint16_t *gradient;
    uint16_t *working;
    int64_t start, stop;
} share;

static void *move(void *argument) {
    share s = *(share *)argument;
    float *restrict w = s.weight, *restrict m = s.mean, *restrict v = s.square;
    const uint16_t *restrict g = s.gradient;
    uint16_t *restrict o = s.working;
    for (int64_t i = s.start; i < s.stop; i++) {
        uint32_t bits = (uint32_t)g[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        w[i] += value;
        m[i] += value;
        v[i] += value;
        o[i] = g[i];
    }
    return 0;
}

void triad(float *w, float *m, float *v, const uint16_t *g, uint16_t *o, int64_t count, int64_t num_threads) {
    pthread_t helpers[MAX_THREADS];
    share shares[MAX_THREADS];
    int64_t each = (count + num_threads - 1) / num_threads;
    for (int64_t i = 0; i < num_threads; i++) {
        int64_t stop = (i + 1) * each < count ? (i + 1) * each : count;
        shares[i] = (share){w, m, v, g, o, i * each < count ? i * each : count, stop};
        if (i && pthread_create(&helpers[i], 0, move, &shares[i])) move(&shares[i]), helpers[i] = 0;
    }
    move(&shares[0]);
    for (int64_t i = 1; i < num_threads; i++)
        if (helpers[i]) pthread_join(helpers[i], 0);
}
