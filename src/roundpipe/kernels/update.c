// One pass over parameters: offloaded gradient, master and moments in; master, moments and working
// copy out.
//
// A block that stays in the first-level cache goes through three loops: gradient parts are added up
// in fp32 and scaled, a rule updates master and moments, the new weight is rounded to the working
// dtype. Memory so is read and written once. Each element's result depends on that element alone,
// so threads and blocks change no number. Operations and their order are those of torch's fused
// kernels; what those contract is contracted here by name (fmaf), nothing else may be. The working
// copy is written past the cache, because nothing of it is read here: a line would be fetched to be
// written. Measured and rejected: the same for masters and moments, prefetching by hand, blocks of
// 256, 1024 or 2048, one loop in place of three.

#include <pthread.h>
#include <stdatomic.h>

#include "lean.h"
#include "numbers.h"

enum { CHUNK = 32 * BLOCK, CHUNKS_WORTH_A_THREAD = 4 };
enum { MAX_THREADS = 256, STACK_BYTES = 1 << 18 };
enum rule { ADAM, ADAM_AMSGRAD, SGD, SGD_MOMENTUM, LEAN, SQUARES };

typedef struct {
    int64_t rule;
    float scale;          // of the gradient; negative to maximize
    float coupled_decay;  // times the weight, added to the gradient
    float decay;          // the weight is multiplied by this first
    float coefficients[7];
    uint32_t keys[4];  // of random numbers
} formula;

typedef struct {
    const formula *formula;
    int64_t num_written, num_parts, is_published, count;
    // Filled in here. ``written``: weight and moments, in fp32 but for LEAN; for SQUARES the result
    // of each chunk, in double, so that their sum has one order. The gradient is the sum of the
    // parts; behind them comes the working copy, if that is to be written.
    const array *written, *parts;
    int64_t first_chunk;
} job;

// The rules. `g` holds the gradient and is left holding the new weight.

static inline __attribute__((always_inline)) void adam(
    const formula *f, float *restrict g, float *restrict x, float *restrict m, float *restrict v,
    float *restrict largest, int64_t n) {
    const float lerp = f->coefficients[0], beta2 = f->coefficients[1], share2 = f->coefficients[2];
    const float correction = f->coefficients[3], eps = f->coefficients[4];
    const float step = f->coefficients[5];
    const float decay = f->decay, near_old = fabsf(lerp) < 0.5f;
    for (int64_t i = 0; i < n; i++) {
        float mean =
            near_old ? fmaf(lerp, g[i] - m[i], m[i]) : fmaf(lerp - 1.0f, g[i] - m[i], g[i]);
        float square = fmaf(share2 * g[i], g[i], v[i] * beta2);
        float bound = square;
        m[i] = mean;
        v[i] = square;
        if (largest) {
            bound = largest[i] > square || largest[i] != largest[i] ? largest[i] : square;
            largest[i] = bound;
        }
        x[i] = x[i] * decay + step * mean / (sqrtf(bound) / correction + eps);
        g[i] = x[i];
    }
}

static inline __attribute__((always_inline)) void sgd(
    const formula *f, float *restrict g, float *restrict x, float *restrict velocity, int64_t n) {
    const float momentum = f->coefficients[0], share = f->coefficients[1];
    const float is_first = f->coefficients[2];
    const float nesterov = f->coefficients[3], step = f->coefficients[4];
    for (int64_t i = 0; i < n; i++) {
        float change = g[i];
        if (velocity) {
            velocity[i] = is_first ? g[i] : fmaf(g[i], share, velocity[i] * momentum);
            change = nesterov ? fmaf(velocity[i], momentum, g[i]) : velocity[i];
        }
        x[i] = fmaf(change, step, x[i]);
        g[i] = x[i];
    }
}

// Sums in lanes, because the compiler may not reorder additions, and in double from block to block.
static double sum_of_squares(const float *restrict g, int64_t n) {
    enum { LANES = 16 };
    float lanes[LANES] = {0};
    double sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++)
            lanes[lane] = fmaf(g[i + lane], g[i + lane], lanes[lane]);
    for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
    for (; i < n; i++) sum += (double)g[i] * g[i];
    return sum;
}

static void update_exact(const job *j, float *restrict g, int64_t at, int64_t n) {
    const formula *f = j->formula;
    float *x = (float *)j->written[0].address + at, *moments[3] = {0};
    for (int64_t i = 1; i < j->num_written; i++)
        moments[i - 1] = (float *)j->written[i].address + at;
    if (f->coupled_decay != 0.0f)
        for (int64_t i = 0; i < n; i++) g[i] = fmaf(x[i], f->coupled_decay, g[i]);
    switch (f->rule) {
        case ADAM: adam(f, g, x, moments[0], moments[1], 0, n); break;
        case ADAM_AMSGRAD: adam(f, g, x, moments[0], moments[1], moments[2], n); break;
        case SGD: sgd(f, g, x, 0, n); break;
        case SGD_MOMENTUM: sgd(f, g, x, moments[0], n); break;
    }
}

static void update_block(const job *j, int64_t at, int64_t n) {
    _Alignas(64) float g[BLOCK], other[BLOCK];
    const formula *f = j->formula;
    read(g, j->parts[0], at, n);
    for (int64_t part = 1; part < j->num_parts; part++) {
        read(other, j->parts[part], at, n);
        for (int64_t i = 0; i < n; i++) g[i] += other[i];
    }
    if (f->rule == SQUARES) {
        ((double *)j->written[0].address)[at / CHUNK] += sum_of_squares(g, n);
        return;
    }
    if (f->scale != 1.0f)
        for (int64_t i = 0; i < n; i++) g[i] *= f->scale;
    if (f->rule == LEAN) {
        lean_adam a;
        memcpy(&a, f->coefficients, sizeof a);
        update_lean(&a, f->decay, f->keys, j->written, g, at, n);
    } else {
        update_exact(j, g, at, n);
    }
    if (!j->is_published) return;
    const array weight = j->written[0], working = j->parts[j->num_parts];
    if (f->rule != LEAN) {
        write(working, g, at, n);
    } else if (weight.dtype == FLOAT32) {
        write(working, (const float *)weight.address + at, at, n);
    } else if (working.dtype == weight.dtype) {
        store((uint16_t *)working.address + at, (const uint16_t *)weight.address + at, n);
    } else {
        read(g, weight, at, n);
        write(working, g, at, n);
    }
}

// Chunks are taken by whoever is free: the calling thread and helpers that live for this call only.
// Starting a helper takes about a third as long as a chunk; a small stack is kept by the C library
// for the next one.

typedef struct {
    job *jobs;
    int64_t num_jobs, num_chunks;
    atomic_llong next;
} round_;

static void *work(void *argument) {
    round_ *all = argument;
    int64_t number = 0;
    for (int64_t chunk; (chunk = atomic_fetch_add(&all->next, 1)) < all->num_chunks;) {
        while (number + 1 < all->num_jobs && all->jobs[number + 1].first_chunk <= chunk) number++;
        const job *j = &all->jobs[number];
        int64_t at = (chunk - j->first_chunk) * CHUNK;
        int64_t end = at + CHUNK < j->count ? at + CHUNK : j->count;
        for (; at < end; at += BLOCK) update_block(j, at, end - at < BLOCK ? end - at : BLOCK);
    }
#if defined(__AVX2__)
    _mm_sfence();  // because stores past the cache may overtake what tells others that all is done
#endif
    return 0;
}

void roundpipe_update(
    job *jobs, const array *written, const array *others, int64_t num_jobs, int64_t num_threads) {
    round_ all = {.jobs = jobs, .num_jobs = num_jobs, .num_chunks = 0};
    for (int64_t i = 0; i < num_jobs; i++) {
        jobs[i].written = written;
        written += jobs[i].num_written;
        jobs[i].parts = others;
        others += jobs[i].num_parts + jobs[i].is_published;
        jobs[i].first_chunk = all.num_chunks;
        all.num_chunks += (jobs[i].count + CHUNK - 1) / CHUNK;
    }
    int64_t num_worth = (all.num_chunks + CHUNKS_WORTH_A_THREAD - 1) / CHUNKS_WORTH_A_THREAD;
    if (num_threads > num_worth) num_threads = num_worth;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK_BYTES);
    pthread_t helpers[MAX_THREADS];
    int64_t num_helpers = 0;
    while (num_helpers + 1 < num_threads &&
           !pthread_create(&helpers[num_helpers], &small, work, &all))
        num_helpers++;
    pthread_attr_destroy(&small);
    work(&all);
    while (num_helpers > 0) pthread_join(helpers[--num_helpers], 0);
}
