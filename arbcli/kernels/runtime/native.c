/* The torch backend's loops over integers, and a few over activations, each in one pass.
 *
 * What is computed is said in the Python file of each kernel, which has the reference and the
 * arithmetic. Integers are equal to the torch backend's to the last bit. Sums of floats are taken
 * in an order that shapes alone decide: not the instruction set, and not the number of threads.
 *
 * A matrix is a pointer to its first element and a stride of its rows in elements; columns lie
 * next to each other. Integer arguments are all int64_t, so that the caller needs no prototypes.
 */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define LANES 16
#define MAX_THREADS 64

/* A vector that is a register: compilers keep wider ones in memory, at a tenth of the speed. */
#ifdef __AVX512F__
#define WIDTH 16
#elif defined __AVX__
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float vector __attribute__((vector_size(4 * WIDTH)));

#define LOAD(type, from)                                                                           \
    ({                                                                                             \
        type loaded;                                                                               \
        memcpy(&loaded, from, sizeof loaded);                                                      \
        loaded;                                                                                    \
    })
#define STORE(to, stored_vector)                                                                   \
    do {                                                                                           \
        __auto_type stored = stored_vector;                                                        \
        memcpy(to, &stored, sizeof stored);                                                        \
    } while (0)

/* ---- work on rows, shared among threads ---------------------------------------------------- */

typedef void (*work)(const void *about, int64_t first, int64_t last, int64_t thread);

struct share {
    work run;
    const void *about;
    int64_t rows, unit, shares, next, done;
};

/* Do shares until none is left. Which thread does which changes no result. */
static void take_shares(void *given) {
    struct share *all = given;
    while (__atomic_load_n(&all->next, __ATOMIC_RELAXED) < all->shares) {
        int64_t t = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);
        if (t >= all->shares) return;
        int64_t units = (all->rows + all->unit - 1) / all->unit;
        int64_t first = units * t / all->shares * all->unit;
        int64_t last = units * (t + 1) / all->shares * all->unit;
        all->run(all->about, first, last < all->rows ? last : all->rows, t);
        __atomic_fetch_add(&all->done, 1, __ATOMIC_RELEASE);
    }
}

#ifdef __linux__
/* Of the OpenMP library that torch has loaded: its threads are awake already. */
extern void GOMP_parallel(void (*run)(void *), void *about, unsigned threads, unsigned flags)
    __attribute__((weak));
#define TORCH_THREADS GOMP_parallel
#else
static void (*const TORCH_THREADS)(void (*)(void *), void *, unsigned, unsigned) = NULL;
#endif

struct team {
    void (*run)(void *);
    void *about;
};

static void *run_in_thread(void *given) {
    const struct team *team = given;
    team->run(team->about);
    return NULL;
}

/* Run a function in several threads, this one among them; fewer if some cannot start. */
static void run_team(void (*run)(void *), void *about, int64_t threads) {
    if (threads > 1 && TORCH_THREADS) {
        TORCH_THREADS(run, about, (unsigned)threads, 0);
        return;
    }
    struct team team = {run, about};
    pthread_t started[MAX_THREADS];
    int64_t running = 0;
    while (running < threads - 1 &&
           !pthread_create(&started[running], NULL, run_in_thread, &team))
        running++;
    run(about);
    while (running) pthread_join(started[--running], NULL);
}

/* What loops have shared, in their order, to be done again. */
struct recording {
    struct share *entries;
    int64_t count, room;
};

static __thread struct recording *recorded_now;

static void record(const struct share *all, size_t size) {
    struct recording *to = recorded_now;
    if (to->count == to->room) {
        to->room = 2 * to->room + 64;
        to->entries = realloc(to->entries, (size_t)to->room * sizeof *to->entries);
    }
    void *about = malloc(size);
    memcpy(about, all->about, size);
    to->entries[to->count] = *all;
    to->entries[to->count++].about = about;
}

/* Split rows evenly, at multiples of `unit`. What a thread that cannot start leaves, others do. */
static void share_sized(work run, const void *about, size_t size, int64_t rows, int64_t unit,
                        int64_t threads) {
    int64_t units = (rows + unit - 1) / unit;
    threads = threads > MAX_THREADS ? MAX_THREADS : threads;
    threads = threads > units ? units : threads;
    struct share all = {run, about, rows, unit, threads, 0, 0};
    if (recorded_now) record(&all, size);
    run_team(take_shares, &all, threads);
}

#define share_rows(run, about, rows, unit, threads)                                                \
    share_sized(run, about, sizeof *(about), rows, unit, threads)

/* Record what is shared by loops that this thread calls from now on. */
EXPORT void begin_recording(void) { recorded_now = calloc(1, sizeof *recorded_now); }

/* Returns the recording, for `replay` and `forget_recording`. */
EXPORT int64_t end_recording(void) {
    int64_t made = (int64_t)(intptr_t)recorded_now;
    recorded_now = NULL;
    return made;
}

EXPORT void forget_recording(int64_t given) {
    struct recording *made = (struct recording *)(intptr_t)given;
    for (int64_t i = 0; i < made->count; i++) free((void *)made->entries[i].about);
    free(made->entries), free(made);
}

#if defined __x86_64__ || defined __i386__
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif
#define SPINS 2000 /* before a thread that waits lets others run */

/* Do entry after entry; any number of threads may do so, and none begins one too early. */
static void take_entries(void *given) {
    const struct recording *made = given;
    for (int64_t i = 0; i < made->count; i++) {
        struct share *all = &made->entries[i];
        take_shares(all);
        for (int64_t spins = 0; __atomic_load_n(&all->done, __ATOMIC_ACQUIRE) < all->shares;)
            if (++spins < SPINS) PAUSE();
            else sched_yield();
    }
}

/* Do again what was recorded, in one team of threads. */
EXPORT void replay(int64_t given, int64_t threads) {
    struct recording *made = (struct recording *)(intptr_t)given;
    for (int64_t i = 0; i < made->count; i++) made->entries[i].next = made->entries[i].done = 0;
    run_team(take_entries, made, threads > MAX_THREADS ? MAX_THREADS : threads);
}

/* ---- numbers ------------------------------------------------------------------------------- */

static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

static inline uint32_t random_word(uint32_t of_row, int64_t k) {
    return mix((uint32_t)k * 0x9E3779B9u ^ of_row);
}

/* The words of a pair of rows: the even one has the low halves, the odd one the high halves. */
static void random_words(uint32_t *words, int64_t row, uint32_t key, int64_t columns) {
    uint32_t of_row = mix((uint32_t)row ^ key);
    for (int64_t k = 0; k < columns; k++) words[k] = random_word(of_row, k);
}

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* Round to bfloat16, to nearest even; what is not a number stays none. */
static inline uint16_t to_bf16(float x) {
    uint32_t bits = to_bits(x);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
}

/* Read a row of float32 or bfloat16; the result is the row itself, or a copy in `buffer`. */
static const float *load_row(const void *matrix, int64_t at, int64_t n, int bf16, float *buffer) {
    if (!bf16) return (const float *)matrix + at;
    const uint16_t *row = (const uint16_t *)matrix + at;
    for (int64_t k = 0; k < n; k++) buffer[k] = from_bits((uint32_t)row[k] << 16);
    return buffer;
}

static float *row_to_write(void *matrix, int64_t at, int bf16, float *buffer) {
    return bf16 ? buffer : (float *)matrix + at;
}

static void store_row(void *matrix, int64_t at, int64_t n, int bf16, const float *buffer) {
    if (!bf16) return;
    uint16_t *row = (uint16_t *)matrix + at;
    for (int64_t k = 0; k < n; k++) row[k] = to_bf16(buffer[k]);
}

/* Sum x[k] * y[k]: 16 sums side by side, then the rest. */
static float sum_products(const float *x, const float *y, int64_t n) {
    vector total[LANES / WIDTH] = {0};
    float rest = 0, part[LANES];
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES)
        for (int v = 0; v < LANES / WIDTH; v++)
            total[v] += LOAD(vector, x + k + v * WIDTH) * LOAD(vector, y + k + v * WIDTH);
    for (; k < n; k++) rest += x[k] * y[k];
    memcpy(part, total, sizeof part);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0] + rest;
}

static float *new_floats(int64_t n) { return malloc((size_t)(n > 0 ? n : 1) * sizeof(float)); }

/* ---- packed trits -------------------------------------------------------------------------- */

static inline uint8_t third(uint8_t x) { return (uint8_t)((uint16_t)x * 171 >> 9); }

static inline int64_t plane_width(int64_t columns, int64_t block) {
    int64_t rest = columns - 160 * block;
    return rest >= 160 ? 32 : (rest + 4) / 5;
}

/* Unpack a row; `trits` has room for whole planes, up to four more than there are columns. */
static void unpack_row(const uint8_t *packed, int8_t *trits, int64_t columns) {
    for (int64_t block = 0; 160 * block < columns; block++) {
        int64_t width = plane_width(columns, block);
        const uint8_t *bytes = packed + 32 * block;
        int8_t *out = trits + 160 * block;
        uint8_t left[32];
        memcpy(left, bytes, (size_t)width);
        for (int d = 0; d < 5; d++)
            for (int64_t j = 0; j < width; j++) {
                uint8_t next = third(left[j]);
                out[width * d + j] = (int8_t)(left[j] - 3 * next - 1);
                left[j] = next;
            }
    }
}

/* Pack a row; what `trits` has after the columns has to be 0. */
static void pack_row(uint8_t *packed, const int8_t *trits, int64_t columns) {
    for (int64_t block = 0; 160 * block < columns; block++) {
        int64_t width = plane_width(columns, block);
        const int8_t *from = trits + 160 * block;
        uint8_t *bytes = packed + 32 * block;
        for (int64_t j = 0; j < width; j++) {
            int byte = from[4 * width + j];
            for (int d = 3; d >= 0; d--) byte = 3 * byte + from[width * d + j];
            bytes[j] = (uint8_t)(byte + 121);
        }
    }
}

struct packed {
    const uint8_t *trits;
    const int8_t *exponent, *fraction, *remainder; /* NULL: fractions of 0; trits alone */
    const int32_t *roots;                          /* 2**(F / 128) as bits of a float32 */
    int64_t trits_stride, exponent_stride, fraction_stride, remainder_stride;
    int64_t columns, group, radix, low, unit, nibble;
};

static inline float scale_of(const struct packed *w, int64_t row, int64_t group) {
    int32_t octave = w->exponent[row * w->exponent_stride + group];
    if (!w->fraction) return from_bits((uint32_t)(octave + 127) << 23);
    uint8_t fraction = (uint8_t)w->fraction[row * w->fraction_stride + group];
    return from_bits((uint32_t)w->roots[fraction] + ((uint32_t)octave << 23));
}

/* The digits of a row, T or z / U, as float32. */
static void digits_of_row(const struct packed *w, int64_t row, int8_t *trits, float *digits) {
    unpack_row(w->trits + row * w->trits_stride, trits, w->columns);
    if (!w->remainder) {
        for (int64_t k = 0; k < w->columns; k++) digits[k] = trits[k];
        return;
    }
    const int8_t *low = w->remainder + row * w->remainder_stride;
    int32_t radix = (int32_t)w->radix, of_low = (int32_t)w->low;
    float part = 1.0f / (float)w->unit;
    if (w->nibble)
        for (int64_t k = 0; k < w->columns; k++)
            digits[k] = (float)(trits[k] * radix + ((int8_t)(low[k] * 16) >> 4) * of_low) * part;
    else
        for (int64_t k = 0; k < w->columns; k++)
            digits[k] = (float)(trits[k] * radix + low[k] * of_low) * part;
}

struct decoding {
    struct packed w;
    void *weight;
    int64_t bf16;
};

static void decode_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct decoding *about = given;
    const struct packed *w = &about->w;
    int64_t columns = w->columns;
    int8_t *trits = malloc((size_t)columns + 8);
    float *digits = new_floats(columns), *buffer = new_floats(columns);
    for (int64_t n = first; n < last; n++) {
        digits_of_row(w, n, trits, digits);
        float *row = row_to_write(about->weight, n * columns, (int)about->bf16, buffer);
        for (int64_t g = 0, k = 0; k < columns; g++) {
            float scale = scale_of(w, n, g);
            int64_t end = k + w->group < columns ? k + w->group : columns;
            for (; k < end; k++) row[k] = digits[k] * scale;
        }
        if (w->remainder && !about->bf16)
            for (int64_t k = 0; k < columns; k++) row[k] = from_bits((uint32_t)to_bf16(row[k]) << 16);
        store_row(about->weight, n * columns, columns, (int)about->bf16, row);
    }
    free(trits), free(digits), free(buffer);
}

#define PACKED_ARGUMENTS                                                                           \
    const uint8_t *trits, const int8_t *exponent, const int8_t *fraction,                          \
        const int8_t *remainder, const int32_t *roots, int64_t trits_stride,                       \
        int64_t exponent_stride, int64_t fraction_stride, int64_t remainder_stride,                \
        int64_t columns, int64_t group, int64_t radix, int64_t low, int64_t unit, int64_t nibble
#define PACKED                                                                                     \
    {trits, exponent, fraction, remainder, roots, trits_stride, exponent_stride, fraction_stride,  \
     remainder_stride, columns, group, radix, low, unit, nibble}

/* weight: (N, K) contiguous. */
EXPORT void decode(PACKED_ARGUMENTS, void *weight, int64_t bf16, int64_t rows, int64_t threads) {
    struct decoding about = {PACKED, weight, bf16};
    share_rows(decode_rows, &about, rows, 1, threads);
}

/* ---- statistics of a gradient --------------------------------------------------------------- */

#define PART_ROWS 64 /* of a part of the sums of columns */

struct statistics {
    struct packed w;
    const void *grad;
    int64_t stride, bf16, signs;
    float *slope, *rows, *columns;
};

static void statistics_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct statistics *about = given;
    const struct packed *w = &about->w;
    int64_t columns = w->columns, groups = (columns + w->group - 1) / w->group;
    int8_t *trits = malloc((size_t)columns + 8);
    float *digits = new_floats(columns), *buffer = new_floats(columns);
    float *signs = new_floats(columns);
    for (int64_t n = first; n < last; n++) {
        const float *grad = load_row(about->grad, n * about->stride, columns, (int)about->bf16, buffer);
        const float *values = grad;
        digits_of_row(w, n, trits, digits);
        if (about->signs) {
            for (int64_t k = 0; k < columns; k++) signs[k] = (float)((grad[k] > 0) - (grad[k] < 0));
            values = signs;
        }
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = g * w->group, end = k + w->group < columns ? k + w->group : columns;
            float sum = sum_products(values + k, digits + k, end - k);
            about->slope[n * groups + g] = sum * scale_of(w, n, g);
        }
        about->rows[n] = sum_products(grad, grad, columns);
        if (about->columns) {
            float *total = about->columns + n / PART_ROWS * columns;
            if (n % PART_ROWS == 0) memset(total, 0, (size_t)columns * sizeof(float));
            for (int64_t k = 0; k < columns; k++) total[k] += grad[k] * grad[k];
        }
    }
    free(trits), free(digits), free(buffer), free(signs);
}

/* slope: (N, groups); rows: (N,); columns: (ceil(N / 64), K) or NULL. */
EXPORT void gradient_statistics(PACKED_ARGUMENTS, const void *grad, int64_t grad_stride,
                                int64_t bf16, int64_t signs, float *slope, float *row_squares,
                                float *column_squares, int64_t rows, int64_t threads) {
    struct statistics about = {PACKED, grad, grad_stride, bf16, signs, slope, row_squares,
                               column_squares};
    share_rows(statistics_rows, &about, rows, PART_ROWS, threads);
}

/* ---- running statistics of rows or columns --------------------------------------------------- */

#define UNSET (-128)
#define HIGHEST (127 * 128 + 127)

struct averaging {
    const float *sums;
    int8_t *statistic;
    float *gain;
    int64_t parts, length, stride, digit_stride, ok;
    uint32_t key;
    double count, factor;
};

static void average_values(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct averaging *about = given;
    uint32_t of_row = mix(about->key);
    for (int64_t i = first; i < last; i++) {
        int8_t *whole = about->statistic + i * about->stride, *fraction = whole + about->digit_stride;
        double value = *whole == UNSET ? 0 : exp2(*whole + *fraction / 128.0), sum = 0;
        if (about->ok) {
            for (int64_t part = 0; part < about->parts; part++)
                sum += about->sums[part * about->length + i];
            sum = sum / about->count + 0x1p-120; /* of zeros there is a logarithm, too */
            double t = 128 * log2(*whole == UNSET ? sum : 0.99 * value + 0.01 * sum);
            t = t < -127 * 128 ? -127 * 128 : t > HIGHEST ? HIGHEST : t;
            int32_t digits = (int32_t)floor(t + (random_word(of_row, i) & 0xFFFF) / 65536.0);
            *whole = (int8_t)(digits >> 7);
            *fraction = (int8_t)(digits & 127);
            value = exp2(digits / 128.0);
        }
        about->gain[i] = (float)(about->factor / sqrt(value < 1e-38 ? 1e-38 : value));
    }
}

/* sums: (parts, length), of `count` squares each; statistic: (length, 2), as it was if not `ok`;
 * gain: (length,), `factor` over the statistic's root. */
EXPORT void average_statistic(const float *sums, int64_t parts, int8_t *statistic, int64_t stride,
                              int64_t digit_stride, const int32_t *key, int64_t ok, double count,
                              double factor, float *gain, int64_t length, int64_t threads) {
    struct averaging about = {sums, statistic, gain, parts, length, stride, digit_stride, ok,
                              (uint32_t)*key, count, factor};
    share_rows(average_values, &about, length, 64, threads);
}

/* ---- directions ------------------------------------------------------------------------------ */

struct direction {
    const void *values;
    const float *row_gain, *column_gain; /* NULL: the sign of the values; ones */
    int64_t stride, bf16, gain_stride, columns;
};

static inline int32_t to_fixed(float u, float limit) {
    u = u < -limit ? -limit : u > limit ? limit : u;
    return (int32_t)rintf(u);
}

/* u of a row, in units of 2**-16. */
static void direction_of_row(const struct direction *d, int64_t n, float limit, int32_t *u,
                             float *buffer) {
    const float *values = load_row(d->values, n * d->stride, d->columns, (int)d->bf16, buffer);
    if (!d->row_gain) {
        for (int64_t k = 0; k < d->columns; k++)
            u[k] = ((values[k] > 0) - (values[k] < 0)) * 65536;
        return;
    }
    float gain = d->row_gain[n * d->gain_stride];
    if (d->column_gain)
        for (int64_t k = 0; k < d->columns; k++)
            u[k] = to_fixed(values[k] * gain * d->column_gain[k], limit);
    else
        for (int64_t k = 0; k < d->columns; k++) u[k] = to_fixed(values[k] * gain, limit);
}

struct squares {
    struct direction d;
    float *squares;
};

static void squares_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct squares *about = given;
    const struct direction *d = &about->d;
    float *buffer = new_floats(d->columns), *product = new_floats(d->columns);
    for (int64_t n = first; n < last; n++) {
        const float *u = load_row(d->values, n * d->stride, d->columns, (int)d->bf16, buffer);
        float gain = d->row_gain ? d->row_gain[n * d->gain_stride] : 1.0f;
        if (d->column_gain) {
            for (int64_t k = 0; k < d->columns; k++) product[k] = u[k] * d->column_gain[k] * gain;
            u = product;
        } else if (d->row_gain) {
            for (int64_t k = 0; k < d->columns; k++) product[k] = u[k] * gain;
            u = product;
        }
        about->squares[n] = sum_products(u, u, d->columns);
    }
    free(buffer), free(product);
}

#define DIRECTION_ARGUMENTS                                                                        \
    const void *values, const float *row_gain, const float *column_gain, int64_t values_stride,    \
        int64_t values_bf16, int64_t gain_stride, int64_t columns
#define DIRECTION                                                                                  \
    {values, row_gain, column_gain, values_stride, values_bf16, gain_stride, columns}

/* squares: (N,), sums of (values * row_gain * column_gain)**2. */
EXPORT void row_squares(DIRECTION_ARGUMENTS, float *squares, int64_t rows, int64_t threads) {
    struct squares about = {DIRECTION, squares};
    share_rows(squares_rows, &about, rows, 1, threads);
}

/* gain: (N,), what gives rows one length and all of them unit root-mean-square; 0 for rows that are
 * zero or not finite. Returns whether all are finite. */
EXPORT int64_t unit_rows(DIRECTION_ARGUMENTS, float *gain, int64_t rows, int64_t threads) {
    struct squares about = {DIRECTION, gain};
    share_rows(squares_rows, &about, rows, 1, threads);
    int64_t finite = 1, usable = 0;
    for (int64_t n = 0; n < rows; n++) {
        if (!(gain[n] < INFINITY)) finite = 0, gain[n] = 0;
        usable += gain[n] > 0;
    }
    float unit = 65536.0f * sqrtf((float)rows / (float)(usable ? usable : 1));
    for (int64_t n = 0; n < rows; n++)
        if (gain[n] > 0) gain[n] = unit / sqrtf(gain[n] / (float)columns);
    return finite;
}

/* ---- the moment ------------------------------------------------------------------------------ */

struct blend {
    struct direction d;
    int8_t *moment;
    int64_t moment_stride;
    uint32_t key, turn; /* of the random bits */
    int32_t decay, gain, shift, nibble;
    int64_t *squares; /* one for each thread */
};

static void blend_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct blend *about = given;
    int64_t columns = about->d.columns, total = 0;
    float *buffer = new_floats(columns);
    int32_t *u = malloc((size_t)columns * 4 + 4);
    uint32_t *words = malloc((size_t)columns * 4 + 4);
    int32_t decay = about->decay, gain = about->gain, shift = about->shift;
    uint32_t turn = about->turn;
    for (int64_t n = first; n < last; n++) {
        direction_of_row(&about->d, n, 1 << 21, u, buffer);
        if (n % 2 == 0) random_words(words, n / 2, about->key, columns);
        int8_t *state = about->moment + n * about->moment_stride;
        int half = n % 2 ? 16 : 0;
        int32_t of_row = 0;
        if (about->nibble)
            for (int64_t k = 0; k < columns; k++) {
                int32_t old = state[k] >> 4;
                int32_t random = (int32_t)((words[k] >> half) + turn & 0xFFFF);
                int32_t m = (old * decay + (u[k] * gain >> shift) + random) >> 16;
                m = m < -7 ? -7 : m > 7 ? 7 : m;
                state[k] = (int8_t)((m * 16) | (state[k] & 15));
                of_row += m * m;
            }
        else
            for (int64_t k = 0; k < columns; k++) {
                int32_t random = (int32_t)((words[k] >> half) + turn & 0xFFFF);
                int32_t m = (state[k] * decay + (u[k] * gain >> shift) + random) >> 16;
                m = m < -127 ? -127 : m > 127 ? 127 : m;
                state[k] = (int8_t)m;
                of_row += m * m;
            }
        total += of_row;
    }
    about->squares[thread] = total;
    free(buffer), free(u), free(words);
}

/* Returns what the squares of the new moment add up to. */
EXPORT int64_t blend_moment(DIRECTION_ARGUMENTS, int8_t *moment, int64_t moment_stride, int64_t key,
                            int64_t turn, int64_t decay, int64_t gain, int64_t shift,
                            int64_t nibble, int64_t rows, int64_t threads) {
    int64_t squares[MAX_THREADS] = {0}, total = 0;
    struct blend about = {DIRECTION, moment, moment_stride, (uint32_t)key, (uint32_t)turn,
                          (int32_t)decay, (int32_t)gain, (int32_t)shift, (int32_t)nibble, squares};
    share_rows(blend_rows, &about, rows, 2, threads);
    for (int t = 0; t < MAX_THREADS; t++) total += squares[t];
    return total;
}

/* ---- the step of trits and remainders -------------------------------------------------------- */

struct step {
    struct direction d; /* without values the step is of the moment */
    uint8_t *packed;
    int8_t *remainder;
    const int8_t *moment; /* NULL: the high half of the remainder's byte */
    int64_t packed_stride, remainder_stride, moment_stride;
    uint32_t key, turn; /* of the random bits */
    int32_t gain, shift, limit, decay, radix, remainder_max, nibble;
    int64_t *flips; /* one for each thread */
};

static void step_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct step *about = given;
    int64_t columns = about->d.columns, total = 0;
    float *buffer = new_floats(columns);
    int32_t *u = malloc((size_t)columns * 4 + 4);
    uint32_t *words = malloc((size_t)columns * 4 + 4);
    int8_t *trits = calloc((size_t)columns + 8, 1);
    int32_t gain = about->gain, shift = about->shift, limit = about->limit, decay = about->decay;
    int32_t radix = about->radix, half = radix / 2, most = radix + about->remainder_max;
    int nibble = about->nibble;
    uint32_t turn = about->turn;
    for (int64_t n = first; n < last; n++) {
        int8_t *state = about->remainder + n * about->remainder_stride;
        uint8_t *packed = about->packed + n * about->packed_stride;
        if (about->d.values) {
            direction_of_row(&about->d, n, 1 << 18, u, buffer);
            for (int64_t k = 0; k < columns; k++) u[k] = u[k] * gain >> shift;
        } else if (about->moment) {
            const int8_t *moment = about->moment + n * about->moment_stride;
            for (int64_t k = 0; k < columns; k++) u[k] = moment[k] * gain;
        } else {
            for (int64_t k = 0; k < columns; k++) u[k] = (state[k] >> 4) * gain;
        }
        if (n % 2 == 0) random_words(words, n / 2, about->key, columns);
        unpack_row(packed, trits, columns);
        int odd = n % 2 ? 16 : 0;
        int32_t of_row = 0;
        for (int64_t k = 0; k < columns; k++) {
            int32_t step = u[k] < -limit ? -limit : u[k] > limit ? limit : u[k];
            int32_t random = (int32_t)((words[k] >> odd) + turn & 0xFFFF);
            int32_t low = nibble ? (int8_t)(state[k] * 16) >> 4 : state[k];
            int32_t old = trits[k], z = low + old * radix;
            step += z * decay >> 8;
            z += (random - step) >> 16;
            z = z < -most ? -most : z > most ? most : z;
            int32_t new = (z > half) - (z < -half);
            z -= new * radix;
            state[k] = (int8_t)(nibble ? (state[k] & -16) | (z & 15) : z);
            trits[k] = (int8_t)new;
            of_row += new != old;
        }
        memset(trits + columns, 0, 8);
        pack_row(packed, trits, columns);
        total += of_row;
    }
    about->flips[thread] = total;
    free(buffer), free(u), free(words), free(trits);
}

/* Returns how many trits changed. */
EXPORT int64_t step_trits(DIRECTION_ARGUMENTS, uint8_t *packed, int64_t packed_stride,
                          int8_t *remainder, int64_t remainder_stride, const int8_t *moment,
                          int64_t moment_stride, int64_t key, int64_t turn, int64_t gain,
                          int64_t shift, int64_t limit, int64_t decay, int64_t radix,
                          int64_t remainder_max, int64_t nibble, int64_t rows, int64_t threads) {
    int64_t flips[MAX_THREADS] = {0}, total = 0;
    struct step about = {DIRECTION, packed, remainder, moment, packed_stride, remainder_stride,
                         moment_stride, (uint32_t)key, (uint32_t)turn, (int32_t)gain,
                         (int32_t)shift, (int32_t)limit, (int32_t)decay, (int32_t)radix,
                         (int32_t)remainder_max, (int32_t)nibble, flips};
    share_rows(step_rows, &about, rows, 2, threads);
    for (int t = 0; t < MAX_THREADS; t++) total += flips[t];
    return total;
}

/* ---- the step of scales ---------------------------------------------------------------------- */

EXPORT void step_scales(int8_t *exponent, int64_t exponent_stride, int8_t *fraction,
                        int64_t fraction_stride, const float *slope, int64_t slope_stride,
                        const float *slope_gain, int64_t key, int64_t gain, int64_t shift,
                        int64_t rows, int64_t groups) {
    for (int64_t n = 0; n < rows; n++) {
        uint32_t of_row = mix((uint32_t)n ^ (uint32_t)key);
        int8_t *octaves = exponent + n * exponent_stride, *rests = fraction + n * fraction_stride;
        for (int64_t g = 0; g < groups; g++) {
            int32_t s = to_fixed(slope[n * slope_stride + g] * *slope_gain, 3 << 16);
            int32_t step = s * (int32_t)gain >> (int32_t)shift;
            step += (int32_t)(mix((uint32_t)g * 0x9E3779B9u ^ of_row) & 0xFFFF);
            int32_t v = octaves[g] * 128 + rests[g] - (step >> 16);
            v = v < -96 * 128 ? -96 * 128 : v > 31 * 128 + 127 ? 31 * 128 + 127 : v;
            octaves[g] = (int8_t)(v >> 7);
            rests[g] = (int8_t)(v & 127);
        }
    }
}

/* ---- norms ------------------------------------------------------------------------------------ */

static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* x / rms(x), in place or not; returns what it was multiplied by. */
static float normalise(const float *x, float *y, int64_t n, float eps) {
    float r = 1.0f / sqrtf(sum_products(x, x, n) / (float)n + eps);
    for (int64_t k = 0; k < n; k++) y[k] = x[k] * r;
    return r;
}

/* grad <- r (grad - xhat mean(xhat grad)). */
static void pass_norm(const float *xhat, float *grad, int64_t n, float r) {
    float mean = sum_products(xhat, grad, n) / (float)n;
    for (int64_t k = 0; k < n; k++) grad[k] = (grad[k] - xhat[k] * mean) * r;
}

static void multiply(float *y, const float *x, const float *weight, int64_t n) {
    if (weight)
        for (int64_t k = 0; k < n; k++) y[k] = x[k] * weight[k];
    else if (y != x)
        memcpy(y, x, (size_t)n * sizeof(float));
}

struct norm {
    const void *x, *grad_y;
    const float *weight; /* NULL: ones */
    void *grad_x, *y;
    int64_t width, x_stride, grad_stride, bf16;
    float eps; /* negative: no norm */
    int gated;
};

static void norm_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct norm *about = given;
    int64_t width = about->width, wide = about->gated ? 2 * width : width;
    int bf16 = (int)about->bf16;
    float *buffer = new_floats(wide), *made = new_floats(width);
    for (int64_t m = first; m < last; m++) {
        const float *x = load_row(about->x, m * about->x_stride, wide, bf16, buffer);
        float *y = row_to_write(about->y, m * width, bf16, made);
        if (about->gated) {
            const float *up = x + width;
            for (int64_t k = 0; k < width; k++) y[k] = x[k] * sigmoid(x[k]) * up[k];
            x = y;
        }
        if (about->eps >= 0) {
            normalise(x, y, width, about->eps);
            multiply(y, y, about->weight, width);
        }
        store_row(about->y, m * width, width, bf16, y);
    }
    free(buffer), free(made);
}

static void norm_backward_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct norm *about = given;
    int64_t width = about->width, wide = about->gated ? 2 * width : width;
    int bf16 = (int)about->bf16;
    float *buffer = new_floats(wide), *of_grad = new_floats(width), *made = new_floats(width);
    float *xhat = new_floats(width), *grad = new_floats(width), *grads = new_floats(wide);
    float *share = new_floats(width);
    for (int64_t m = first; m < last; m++) {
        const float *x = load_row(about->x, m * about->x_stride, wide, bf16, buffer);
        const float *grad_y =
            load_row(about->grad_y, m * about->grad_stride, width, bf16, of_grad);
        float *y = row_to_write(about->y, m * width, bf16, made);
        float *grad_x = row_to_write(about->grad_x, m * wide, bf16, grads);
        const float *from = x, *up = x + width;
        float r = 1.0f;
        if (about->gated) {
            for (int64_t k = 0; k < width; k++) {
                share[k] = sigmoid(x[k]);
                xhat[k] = x[k] * share[k] * up[k];
            }
            from = xhat;
        }
        multiply(grad, grad_y, about->weight, width);
        if (about->eps >= 0) {
            r = normalise(from, xhat, width, about->eps);
            pass_norm(xhat, grad, width, r);
        }
        multiply(y, xhat, about->weight, width);
        if (about->gated)
            for (int64_t k = 0; k < width; k++) {
                float silu = x[k] * share[k];
                grad_x[k] = (x[k] - silu + 1.0f) * share[k] * up[k] * grad[k];
                grad_x[width + k] = silu * grad[k];
            }
        else
            memcpy(grad_x, grad, (size_t)width * sizeof(float));
        store_row(about->y, m * width, width, bf16, y);
        store_row(about->grad_x, m * wide, wide, bf16, grad_x);
    }
    free(buffer), free(of_grad), free(made), free(xhat), free(grad), free(grads), free(share);
}

/* x: (M, width), or (M, 2 width) where it is gated; y: (M, width) contiguous, like x. Where `eps`
 * is negative there is no norm. */
EXPORT void norm(const void *x, int64_t x_stride, int64_t bf16, const float *weight, double eps,
                 int64_t gated, void *y, int64_t rows, int64_t width, int64_t threads) {
    struct norm about = {.x = x, .weight = weight, .y = y, .width = width, .x_stride = x_stride,
                         .bf16 = bf16, .eps = (float)eps, .gated = (int)gated};
    share_rows(norm_rows, &about, rows, 1, threads);
}

/* grad_x: contiguous, like x; y: the result once more. */
EXPORT void norm_backward(const void *grad_y, int64_t grad_stride, const void *x, int64_t x_stride,
                          int64_t bf16, const float *weight, double eps, int64_t gated,
                          void *grad_x, void *y, int64_t rows, int64_t width, int64_t threads) {
    struct norm about = {x, grad_y, weight, grad_x, y, width, x_stride, grad_stride, bf16,
                         (float)eps, (int)gated};
    share_rows(norm_backward_rows, &about, rows, 1, threads);
}

/* ---- dropout ------------------------------------------------------------------------------- */

struct dropout {
    const void *x;
    void *y;
    int64_t width, x_stride, bf16;
    uint32_t key, threshold; /* of the smallest word that is kept */
    float factor;
};

static void drop_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct dropout *about = given;
    int64_t width = about->width;
    int bf16 = (int)about->bf16;
    float *buffer = new_floats(width), *made = new_floats(width);
    for (int64_t m = first; m < last; m++) {
        const float *x = load_row(about->x, m * about->x_stride, width, bf16, buffer);
        float *y = row_to_write(about->y, m * width, bf16, made);
        uint32_t of_row = mix((uint32_t)m ^ about->key);
        for (int64_t k = 0; k < width; k++)
            y[k] = random_word(of_row, k) >= about->threshold ? x[k] * about->factor : 0.0f;
        store_row(about->y, m * width, width, bf16, y);
    }
    free(buffer), free(made);
}

/* x: (rows, width); y: contiguous, like x. */
EXPORT void dropout(const void *x, int64_t x_stride, int64_t bf16, int64_t key, int64_t threshold,
                    double factor, void *y, int64_t rows, int64_t width, int64_t threads) {
    struct dropout about = {x, y, width, x_stride, bf16, (uint32_t)key, (uint32_t)threshold,
                            (float)factor};
    share_rows(drop_rows, &about, rows, 1, threads);
}

/* ---- queries and keys before attention --------------------------------------------------------- */

struct rotary {
    void *qkv, *grad_qkv;
    const void *grads[3];
    float *r;
    const float *cos, *sin;
    int64_t strides[3][3]; /* of the gradients: of a text, a head and a position */
    int64_t length, heads, size, bf16;
    float eps;
};

static void rotate(const float *restrict x, const float *restrict cos, const float *restrict sin,
                 float sign, float factor, float *restrict y, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i], of_b = sign * sin[i];
        y[i] = (a * cos[i] - b * of_b) * factor;
        y[half + i] = (a * of_b + b * cos[i]) * factor;
    }
}

static void rotary_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct rotary *about = given;
    int64_t heads = about->heads, size = about->size, half = size / 2;
    int bf16 = (int)about->bf16;
    float *buffer = new_floats(size), *rotated = new_floats(size);
    for (int64_t m = first; m < last; m++) {
        const float *cos = about->cos + m % about->length * half;
        const float *sin = about->sin + m % about->length * half;
        for (int64_t head = 0; head < 2 * heads; head++) {
            int64_t at = (m * 3 * heads + head) * size;
            const float *x = load_row(about->qkv, at, size, bf16, buffer);
            float r = 1.0f / sqrtf(sum_products(x, x, size) / (float)size + about->eps);
            rotate(x, cos, sin, 1.0f, r, rotated, half);
            about->r[m * 2 * heads + head] = r;
            if (bf16) store_row(about->qkv, at, size, bf16, rotated);
            else memcpy((float *)about->qkv + at, rotated, (size_t)size * sizeof(float));
        }
    }
    free(buffer), free(rotated);
}

static void rotary_backward_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct rotary *about = given;
    int64_t heads = about->heads, size = about->size, half = size / 2;
    int bf16 = (int)about->bf16;
    float *of_y = new_floats(size), *of_grad = new_floats(size), *grad = new_floats(size);
    float *made = new_floats(size);
    for (int64_t m = first; m < last; m++) {
        const float *cos = about->cos + m % about->length * half;
        const float *sin = about->sin + m % about->length * half;
        for (int64_t part = 0; part < 3; part++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t *strides = about->strides[part];
                int64_t from = m / about->length * strides[0] + head * strides[1] +
                               m % about->length * strides[2];
                int64_t at = ((m * 3 + part) * heads + head) * size;
                const float *given_grad = load_row(about->grads[part], from, size, bf16, of_grad);
                float *out = row_to_write(about->grad_qkv, at, bf16, made);
                if (part < 2) {
                    const float *y = load_row(about->qkv, at, size, bf16, of_y);
                    memcpy(grad, given_grad, (size_t)size * sizeof(float));
                    pass_norm(y, grad, size, about->r[(m * 2 + part) * heads + head]);
                    rotate(grad, cos, sin, -1.0f, 1.0f, out, half);
                } else {
                    memcpy(out, given_grad, (size_t)size * sizeof(float));
                }
                store_row(about->grad_qkv, at, size, bf16, out);
            }
    }
    free(of_y), free(of_grad), free(grad), free(made);
}

/* qkv: (B, T, 3, heads, size) contiguous, changed in place; r: (B, T, 2, heads). */
EXPORT void rotary_norm(void *qkv, int64_t bf16, const float *cos, const float *sin,
                        double eps, float *r, int64_t texts, int64_t length, int64_t heads,
                        int64_t size, int64_t threads) {
    struct rotary about = {.qkv = qkv, .r = r, .cos = cos, .sin = sin, .length = length,
                           .heads = heads, .size = size, .bf16 = bf16, .eps = (float)eps};
    share_rows(rotary_rows, &about, texts * length, 1, threads);
}

/* The gradients: (B, heads, T, size) each, with the strides of the first three; grad_qkv like qkv. */
EXPORT void rotary_norm_backward(const void *grad_q, const void *grad_k, const void *grad_v,
                                 int64_t q0, int64_t q1, int64_t q2, int64_t k0, int64_t k1,
                                 int64_t k2, int64_t v0, int64_t v1, int64_t v2, void *qkv,
                                 void *grad_qkv, float *r, int64_t bf16, const float *cos,
                                 const float *sin, int64_t texts, int64_t length, int64_t heads,
                                 int64_t size, int64_t threads) {
    struct rotary about = {.qkv = qkv, .grad_qkv = grad_qkv, .grads = {grad_q, grad_k, grad_v},
                           .r = r, .cos = cos, .sin = sin,
                           .strides = {{q0, q1, q2}, {k0, k1, k2}, {v0, v1, v2}},
                           .length = length, .heads = heads, .size = size, .bf16 = bf16};
    share_rows(rotary_backward_rows, &about, texts * length, 1, threads);
}

/* ---- text: products of rows with prepacked weights -------------------------------------------- */

/* `arbcli/kernels/matmul/prepacked.py` and `permute_lanes` of `int8_matmul.py` say how weights lie. x is
 * rounded to int16, and sums of a plane are integers, which are exact. Lanes are the 16 rows of a tile,
 * so every sum over planes is one lane's, and its order does not depend on how many lanes an instruction
 * has, nor on how many rows x has. */

#define TILE 16
#define PLANE 32
#define AT_ONCE 6 /* rows of x whose sums are in registers */
#define SUMMED 252 /* rows of x whose sums are in the cache */
#if defined __AVX512VNNI__ && defined __AVX512VL__
#define BYTE_SUMS
#endif

static const int BYTE_OF[4] = {0, 2, 1, 3}; /* of four columns, the byte that has a column's codes */

typedef float eight __attribute__((vector_size(32)));
typedef int32_t words __attribute__((vector_size(32)));
typedef uint32_t bits __attribute__((vector_size(32)));
typedef int16_t pairs __attribute__((vector_size(32)));

#define ALL(x) (eight){x, x, x, x, x, x, x, x}

/* Add to each lane the products of its own pair and one that all have. */
static inline words add_pairs(words total, pairs own, const int16_t *x) {
#ifdef __AVX2__
    __m256i all = _mm256_set1_epi32(LOAD(int32_t, x));
#if defined __AVX512VNNI__ && defined __AVX512VL__
    return (words)_mm256_dpwssd_epi32((__m256i)total, (__m256i)own, all);
#else
    return total + (words)_mm256_madd_epi16((__m256i)own, all);
#endif
#else
    for (int i = 0; i < 8; i++) total[i] += own[2 * i] * x[0] + own[2 * i + 1] * x[1];
    return total;
#endif
}

/* Of 8 rows of 4 words each, make 4 columns of 8. */
static inline void transpose_words(const uint8_t *from, int64_t stride, bits to[4]) {
#ifdef __AVX2__
    __m256i rows[4], low[2], high[2];
    for (int i = 0; i < 4; i++) {
        __m128i upper = _mm_loadu_si128((const __m128i *)(from + i * stride));
        __m128i lower = _mm_loadu_si128((const __m128i *)(from + (i + 4) * stride));
        rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(upper), lower, 1);
    }
    for (int i = 0; i < 2; i++) {
        low[i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        high[i] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    to[0] = (bits)_mm256_unpacklo_epi64(low[0], low[1]);
    to[1] = (bits)_mm256_unpackhi_epi64(low[0], low[1]);
    to[2] = (bits)_mm256_unpacklo_epi64(high[0], high[1]);
    to[3] = (bits)_mm256_unpackhi_epi64(high[0], high[1]);
#else
    for (int word = 0; word < 4; word++)
        for (int row = 0; row < 8; row++)
            to[word][row] = LOAD(uint32_t, from + row * stride + 4 * word);
#endif
}

struct arranging {
    struct packed w;
    uint8_t *pieces;
    uint16_t *scales; /* of all digits; NULL: trits */
    int64_t rows, gated, *beyond; /* `beyond`: of each thread, digits that a byte does not hold */
};

/* Put a row, that of lane `lane` of a tile, where it lies. */
static void arrange_trits(const struct arranging *about, const int8_t *trits, int64_t row,
                          uint8_t *tile, int64_t lane) {
    const struct packed *w = &about->w;
    int64_t groups = (w->columns + w->group - 1) / w->group, half = lane / 8, r = lane % 8;
    for (int64_t plane = 0; PLANE * plane < (w->columns + 127) / 128 * 128; plane++) {
        uint8_t *piece = tile + plane / 4 * 640;
        int64_t left = w->columns - PLANE * plane, group = PLANE * plane / w->group;
        for (int word = 0; word < 8; word++)
            for (int byte = 0; byte < 4; byte++) {
                int64_t k = 4 * word + BYTE_OF[byte]; /* which is its own inverse */
                uint8_t code = k < left ? (uint8_t)(trits[PLANE * plane + k] + 1) : 0;
                uint8_t *to = piece + (((word / 2 * 8 + r) * 2 + word % 2) * 2 + half) * 4 + byte;
                *to |= (uint8_t)(code << 2 * (plane % 4));
            }
        uint16_t scale = to_bf16(scale_of(w, row, group < groups ? group : groups - 1));
        memcpy(piece + 512 + ((r * 2 + half) * 4 + plane % 4) * 2, &scale, 2);
    }
}

static int64_t prepack_digits(const struct arranging *about, const float *digits, int64_t row,
                              int8_t *tile, uint16_t *scales, int64_t lane) {
    const struct packed *w = &about->w;
    int64_t beyond = 0;
    for (int64_t k = 0; k < w->columns; k++) {
        int32_t z = (int32_t)(digits[k] * (float)w->unit);
        tile[(k / 2 * TILE + lane) * 2 + k % 2] = (int8_t)z;
        beyond += z < -127 || z > 127;
    }
    for (int64_t plane = 0; PLANE * plane < w->columns; plane++) {
        float scale = scale_of(w, row, PLANE * plane / w->group) / (float)w->unit;
        scales[plane * TILE + 2 * (lane % 8) + lane / 8] = to_bf16(scale);
    }
    return beyond;
}

static void arrange_tiles(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct arranging *about = given;
    const struct packed *w = &about->w;
    int64_t planes = (w->columns + PLANE - 1) / PLANE, n = about->rows / (1 + about->gated);
    int64_t tile_bytes = about->scales ? planes * PLANE * TILE : (w->columns + 127) / 128 * 640;
    int8_t *trits = malloc((size_t)w->columns + 8);
    float *digits = new_floats(w->columns);
    for (int64_t tile = first; tile < last; tile++) {
        uint8_t *pieces = about->pieces + tile * tile_bytes;
        uint16_t *scales = about->scales ? about->scales + tile * planes * TILE : NULL;
        memset(pieces, 0, (size_t)tile_bytes);
        if (scales) memset(scales, 0, (size_t)(planes * TILE) * sizeof *scales);
        for (int64_t lane = 0; lane < TILE; lane++) {
            int64_t row = about->gated ? 8 * tile + lane % 8 : TILE * tile + lane;
            if (row >= n) continue;
            row += about->gated ? lane / 8 * n : 0;
            if (scales) {
                digits_of_row(w, row, trits, digits);
                about->beyond[thread] += prepack_digits(about, digits, row, (int8_t *)pieces, scales, lane);
            } else {
                unpack_row(w->trits + row * w->trits_stride, trits, w->columns);
                arrange_trits(about, trits, row, pieces, lane);
            }
        }
    }
    free(trits), free(digits);
}

/* pieces: of trits (T, B, 640), and `scales` is NULL; of all digits (T, P, 16, 16, 2), and (T, P, 8, 2)
 * scales. Returns how many digits a byte does not hold. */
EXPORT int64_t arrange(PACKED_ARGUMENTS, uint8_t *pieces, uint16_t *scales, int64_t gated,
                       int64_t rows, int64_t threads) {
    int64_t beyond[MAX_THREADS] = {0}, total = 0, width = gated ? TILE / 2 : TILE;
    struct arranging about = {PACKED, pieces, scales, rows, gated, beyond};
    share_rows(arrange_tiles, &about, (rows / (1 + gated) + width - 1) / width, 1, threads);
    for (int t = 0; t < MAX_THREADS; t++) total += beyond[t];
    return total;
}

struct product {
    const void *x, *added; /* NULL: nothing is added */
    void *y;
    const uint8_t *pieces;
    const uint16_t *scales; /* of all digits; NULL: trits, whose scales are in their pieces */
    uint8_t *space;         /* for x as it is multiplied */
    int64_t rows, n, k, gated, x_bf16, bf16;
    float eps; /* negative: no norm */
};

/* Rows of x as they are multiplied, int16, plane by plane. Of a single row and trits the high bytes of
 * a plane come first, then the low ones, by columns as in `prepacked.py`. */
struct rounded {
    int16_t *numbers;
    float *units;    /* of the numbers of a plane, a power of two */
    int32_t *totals; /* sums that codes add, which are 1 more than trits; 0 for all digits */
    float *factors;  /* of a row: what its norm divides by, inverted */
};

static inline int64_t planes_of(const struct product *about) { return (about->k + 127) / 128 * 4; }

static struct rounded rounded_at(const struct product *about, uint8_t *space) {
    int64_t many = planes_of(about) * about->rows;
    struct rounded at = {(int16_t *)space, (float *)(space + 2 * PLANE * many), NULL, NULL};
    at.totals = (int32_t *)(at.units + many);
    at.factors = (float *)(at.totals + many);
    return at;
}

/* Round 32 numbers to int16, with one power of two; if one is not finite, the power is none. */
static void round_plane(const float *x, int16_t *numbers, float *unit, int32_t *total) {
    uint32_t largest = 0;
    for (int i = 0; i < PLANE; i++) {
        uint32_t size = to_bits(x[i]) & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    int32_t exponent = (int32_t)(largest >> 23), sum = 0;
    exponent = exponent < 32 ? 32 : exponent;
    float inverse = from_bits((uint32_t)(268 - exponent) << 23); /* 2**15 / 2**(e + 1) */
    for (int i = 0; i < PLANE; i++) {
        float scaled = x[i] * inverse;
        scaled = scaled > 32767.0f ? 32767.0f : scaled;
        /* added to a number, it leaves the integer nearest to it in the last 16 bits */
        numbers[i] = (int16_t)to_bits(scaled + 12582912.0f);
        sum += numbers[i];
    }
    *total = sum;
    *unit = largest >= 0x7F800000 ? NAN : from_bits((uint32_t)(exponent - 14) << 23);
}

/* Put the high bytes of a plane before the low ones, four columns in the order of their codes. */
static void split_bytes(int16_t *plane) {
    uint8_t bytes[2 * PLANE];
    for (int k = 0; k < PLANE; k++) {
        int at = k / 4 * 4 + BYTE_OF[k % 4];
        bytes[at] = (uint8_t)(plane[k] >> 8);
        bytes[PLANE + at] = (uint8_t)plane[k];
    }
    memcpy(plane, bytes, sizeof bytes);
}

static void round_row(const struct product *about, const struct rounded *to, int64_t m) {
    int64_t k = about->k, whole = k / PLANE, planes = planes_of(about);
    float *buffer = new_floats(k), rest[PLANE] = {0};
    const float *x = load_row(about->x, m * k, k, (int)about->x_bf16, buffer);
    memcpy(rest, x + whole * PLANE, (size_t)(k - whole * PLANE) * sizeof(float));
    to->factors[m] = about->eps < 0 ? 1.0f : 1.0f / sqrtf(sum_products(x, x, k) / (float)k + about->eps);
    for (int64_t plane = 0; plane < planes; plane++) {
        const float *from = plane < whole ? x + plane * PLANE : rest;
        int64_t at = plane * about->rows + m;
        if (plane == whole + 1) memset(rest, 0, sizeof rest);
        round_plane(from, to->numbers + at * PLANE, to->units + at, to->totals + at);
        if (about->scales) to->totals[at] = 0;
        else if (about->rows == 1) split_bytes(to->numbers + at * PLANE);
    }
    free(buffer);
}

static void round_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct product *about = given;
    struct rounded to = rounded_at(about, about->space);
    for (int64_t m = first; m < last; m++) round_row(about, &to, m);
}

/* Scales of a piece of trits, [4 planes][2 halves of a tile]. */
static inline void scales_of_trits(const uint8_t *piece, eight scales[4][2]) {
    bits found[4];
    transpose_words(piece + 512, 16, found);
    for (int half = 0; half < 2; half++)
        for (int two = 0; two < 2; two++) {
            scales[2 * two][half] = (eight)(found[2 * half + two] << 16);
            scales[2 * two + 1][half] = (eight)(found[2 * half + two] & 0xFFFF0000);
        }
}

/* Spread the codes of a piece as int16, [4 planes][16 pairs of columns][2 halves] of eight pairs. */
static inline void spread_trits(const uint8_t *piece, int16_t *codes) {
    for (int j = 0; j < 4; j++) {
        bits four[4];
        transpose_words(piece + 128 * j, 16, four);
        for (int word = 0; word < 4; word++)
            for (int plane = 0; plane < 4; plane++)
                for (int odd = 0; odd < 2; odd++) {
                    int pair = 16 * plane + 4 * j + word / 2 * 2 + odd, half = word % 2;
                    pairs own = (pairs)(four[word] >> (2 * plane + 8 * odd) & 0x00030003);
                    STORE(codes + 16 * (2 * pair + half), own);
                }
    }
}

/* Add products of codes, four columns of eight rows, with bytes of x: `high`, which are signed, and
 * `low`, which are not. Sums are int32, or int16 of every other column where there is no more. */
static inline void add_codes(words *high, words *low, bits codes, const uint8_t *x) {
#ifdef __AVX2__
    __m256i own = (__m256i)codes, above = _mm256_set1_epi32(LOAD(int32_t, x));
    __m256i below = _mm256_set1_epi32(LOAD(int32_t, x + PLANE));
#ifdef BYTE_SUMS
    *high = (words)_mm256_dpbusd_epi32((__m256i)*high, own, above);
    *low = (words)_mm256_dpbusd_epi32((__m256i)*low, below, own);
#else
    *high = (words)_mm256_add_epi16((__m256i)*high, _mm256_maddubs_epi16(own, above));
    *low = (words)_mm256_add_epi16((__m256i)*low, _mm256_maddubs_epi16(below, own));
#endif
#else
    for (int i = 0; i < 8; i++)
        for (int byte = 0; byte < 4; byte++) {
            int32_t code = codes[i] >> 8 * byte & 3;
            (*high)[i] += code * (int8_t)x[byte];
            (*low)[i] += code * x[PLANE + byte];
        }
#endif
}

/* Put the sums of both bytes together, as int32. */
static inline words join_sums(words high, words low) {
#if defined __AVX2__ && !defined BYTE_SUMS
    return (words)_mm256_add_epi32(_mm256_madd_epi16((__m256i)high, _mm256_set1_epi16(256)),
                                   _mm256_madd_epi16((__m256i)low, _mm256_set1_epi16(1)));
#else
    return (high << 8) + low;
#endif
}

/* Multiply the codes of a piece by one row of x, its four planes in bytes. */
static inline void multiply_piece(const uint8_t *piece, const uint8_t *x, words found[4][2]) {
    bits all[4][4];
    for (int j = 0; j < 4; j++) transpose_words(piece + 128 * j, 16, all[j]);
#pragma GCC unroll 4 /* shifts by numbers that are known, and sums that stay in registers */
    for (int plane = 0; plane < 4; plane++, x += 2 * PLANE) {
        words high[2] = {{0}, {0}}, low[2] = {{0}, {0}};
#pragma GCC unroll 1
        for (int j = 0; j < 4; j++)
            for (int word = 0; word < 4; word++)
                add_codes(&high[word % 2], &low[word % 2], all[j][word] >> 2 * plane & 0x03030303,
                          x + 8 * j + word / 2 * 4);
        for (int half = 0; half < 2; half++) found[plane][half] = join_sums(high[half], low[half]);
    }
}

/* Widen the bytes of all digits, a pair of columns of eight rows. */
static inline pairs load_digits(const int8_t *from) {
#ifdef __AVX2__
    return (pairs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
    pairs loaded;
    for (int i = 0; i < 16; i++) loaded[i] = from[i];
    return loaded;
#endif
}

/* Scales of a plane of all digits, of both halves of a tile. */
static inline void scales_of_digits(const uint16_t *scales, eight found[2]) {
    bits both = LOAD(bits, scales);
    found[0] = (eight)(both << 16);
    found[1] = (eight)(both & 0xFFFF0000);
}

/* Multiply a plane of all digits by the only row of x. */
static inline void multiply_plane(const int8_t *plane, const int16_t *x, words found[2]) {
    found[0] = found[1] = (words){0};
    for (int pair = 0; pair < PLANE / 2; pair++, plane += 2 * TILE)
        for (int half = 0; half < 2; half++)
            found[half] = add_pairs(found[half], load_digits(plane + TILE * half), x + 2 * pair);
}

/* Scale what was found of a plane, and add it to the sums. */
static inline void add_found(words found, float unit, eight scale, float *sums) {
    STORE(sums, LOAD(eight, sums) + __builtin_convertvector(found, eight) * unit * scale);
}

/* Multiply the int16 codes of a plane by `count` rows of x, and add that to the sums. */
static inline __attribute__((always_inline)) void
add_rows(const int16_t *codes, const eight scales[2], const int16_t *x, const float *units,
         const int32_t *totals, float *sums, const int count) {
    words found[AT_ONCE][2];
    for (int m = 0; m < count; m++)
        for (int half = 0; half < 2; half++) found[m][half] = (words){0} - totals[m];
    for (int pair = 0; pair < PLANE / 2; pair++) {
        pairs upper = LOAD(pairs, codes + 32 * pair), lower = LOAD(pairs, codes + 32 * pair + 16);
        for (int m = 0; m < count; m++) {
            found[m][0] = add_pairs(found[m][0], upper, x + m * PLANE + 2 * pair);
            found[m][1] = add_pairs(found[m][1], lower, x + m * PLANE + 2 * pair);
        }
    }
    for (int m = 0; m < count; m++)
        for (int half = 0; half < 2; half++)
            add_found(found[m][half], units[m], scales[half], sums + m * TILE + 8 * half);
}

/* Multiply a plane by `rows` rows of x from `first` on, of `of` in all. */
static void multiply_by_codes(const int16_t *codes, const eight scales[2], const struct rounded *x,
                              int64_t plane, int64_t first, int64_t rows, int64_t of, float *sums) {
    int64_t at = plane * of + first, m = 0;
    for (; m + AT_ONCE <= rows; m += AT_ONCE)
        add_rows(codes, scales, x->numbers + (at + m) * PLANE, x->units + at + m, x->totals + at + m,
                 sums + m * TILE, AT_ONCE);
    for (; m < rows; m++)
        add_rows(codes, scales, x->numbers + (at + m) * PLANE, x->units + at + m, x->totals + at + m,
                 sums + m * TILE, 1);
}

/* Multiply a tile by some rows of x from `first` on, or by the only one. */
static void multiply_by_trits(const uint8_t *tile, const struct rounded *x, int64_t first,
                              int64_t rows, int64_t of, int64_t planes, float *sums) {
    int16_t codes[4 * PLANE * TILE] __attribute__((aligned(64)));
    for (int64_t plane = 0; plane < planes; plane += 4, tile += 640) {
        eight scales[4][2];
        scales_of_trits(tile, scales);
        if (of == 1) {
            words found[4][2];
            multiply_piece(tile, (const uint8_t *)(x->numbers + plane * PLANE), found);
            for (int i = 0; i < 4; i++)
                for (int half = 0; half < 2; half++)
                    add_found(found[i][half] - x->totals[plane + i], x->units[plane + i],
                              scales[i][half], sums + 8 * half);
            continue;
        }
        spread_trits(tile, codes);
        for (int i = 0; i < 4 && plane + i < planes; i++)
            multiply_by_codes(codes + i * PLANE * TILE, scales[i], x, plane + i, first, rows, of, sums);
    }
}

static void multiply_by_digits(const int8_t *tile, const uint16_t *scales, const struct rounded *x,
                               int64_t first, int64_t rows, int64_t of, int64_t planes,
                               float *sums) {
    int16_t codes[PLANE * TILE] __attribute__((aligned(64)));
    for (int64_t plane = 0; plane < planes; plane++, tile += PLANE * TILE, scales += TILE) {
        eight of_plane[2];
        scales_of_digits(scales, of_plane);
        if (of == 1) {
            words found[2];
            multiply_plane(tile, x->numbers + plane * PLANE, found);
            for (int half = 0; half < 2; half++)
                add_found(found[half], x->units[plane], of_plane[half], sums + 8 * half);
            continue;
        }
        for (int at = 0; at < PLANE * TILE; at += TILE) STORE(codes + at, load_digits(tile + at));
        multiply_by_codes(codes, of_plane, x, plane, first, rows, of, sums);
    }
}

/* Norm, gate and sum of a row of a tile. */
static void write_results(const struct product *about, int64_t tile, int64_t m, float factor,
                          const float *sums) {
    int64_t width = about->gated ? TILE / 2 : TILE, first = tile * width;
    int64_t count = about->n - first < width ? about->n - first : width, at = m * about->n + first;
    float result[TILE], buffer[TILE];
    for (int64_t i = 0; i < count; i++) result[i] = sums[i] * factor;
    if (about->gated)
        for (int64_t i = 0; i < count; i++)
            result[i] = result[i] * sigmoid(result[i]) * (sums[8 + i] * factor);
    if (about->added) {
        const float *added = load_row(about->added, at, count, (int)about->bf16, buffer);
        for (int64_t i = 0; i < count; i++) result[i] += added[i];
    }
    if (about->bf16) store_row(about->y, at, count, 1, result);
    else memcpy((float *)about->y + at, result, (size_t)count * sizeof(float));
}

static void multiply_tiles(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct product *about = given;
    int64_t rows = about->rows, planes = planes_of(about), real = (about->k + PLANE - 1) / PLANE;
    /* of a single row every thread rounds its own, which takes less time than waiting for one */
    int64_t own = rows == 1 ? thread * (PLANE * 2 + 8) * planes + thread * 4 : 0;
    struct rounded x = rounded_at(about, about->space + own);
    if (rows == 1) round_row(about, &x, 0);
    float sums[SUMMED * TILE] __attribute__((aligned(64)));
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t m = 0; m < rows; m += SUMMED) {
            int64_t count = rows - m < SUMMED ? rows - m : SUMMED;
            memset(sums, 0, (size_t)(count * TILE) * sizeof(float));
            if (about->scales)
                multiply_by_digits((const int8_t *)about->pieces + PLANE * TILE * real * tile,
                                   about->scales + TILE * real * tile, &x, m, count, rows, real, sums);
            else
                multiply_by_trits(about->pieces + 160 * tile * planes, &x, m, count, rows, real, sums);
            for (int64_t i = 0; i < count; i++)
                write_results(about, tile, m + i, x.factors[m + i], sums + i * TILE);
        }
}

/* x: (M, K); y: (M, N); added: like y, or NULL; all contiguous. pieces and scales: as they are
 * prepacked; scales: NULL for trits. space: for every thread (72 ceil(K / 128) 4 + 4) M bytes. Where
 * `eps` is negative there is no norm. */
EXPORT void multiply_rows(const void *x, int64_t x_bf16, const uint8_t *pieces,
                          const uint16_t *scales, const void *added, void *y, int64_t bf16,
                          int64_t gated, double eps, uint8_t *space, int64_t rows, int64_t n,
                          int64_t k, int64_t threads) {
    struct product about = {x, added, y, pieces, scales, space, rows, n, k, gated, x_bf16, bf16,
                            (float)eps};
    int64_t width = gated ? TILE / 2 : TILE;
    if (rows > 1) share_rows(round_rows, &about, rows, 1, threads);
    share_rows(multiply_tiles, &about, (n + width - 1) / width, 1, threads);
}

/* ---- text: attention of one position, rows of a table, and what counts positions --------------- */

struct position {
    const void *qkv;
    void *keys, *values, *y;
    const int32_t *position;
    const float *cos, *sin;
    int64_t heads, window, width, bf16;
    float eps;
};

#define KEYS 8 /* that a query is multiplied by at a time */

/* Sum the lanes of 8 vectors, neighbours first. */
static inline eight sum_each(const eight v[8]) {
#ifdef __AVX2__
    __m256 two[4], four[2];
    for (int i = 0; i < 4; i++) two[i] = _mm256_hadd_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    for (int i = 0; i < 2; i++) four[i] = _mm256_hadd_ps(two[2 * i], two[2 * i + 1]);
    __m256 upper = _mm256_permute2f128_ps(four[0], four[1], 0x20);
    return (eight)_mm256_add_ps(upper, _mm256_permute2f128_ps(four[0], four[1], 0x31));
#else
    eight sums;
    for (int i = 0; i < 8; i++)
        sums[i] = ((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) + ((v[i][4] + v[i][5]) + (v[i][6] + v[i][7]));
    return sums;
#endif
}

/* Eight numbers of a row of float32 or bfloat16 from `at` on; those from `end` on are 0. */
static inline eight load_eight(const void *matrix, int64_t at, int64_t end, int bf16) {
    const uint16_t *halves = (const uint16_t *)matrix + at;
    const float *numbers = (const float *)matrix + at;
    if (end - at < 8) {
        float found[8] = {0};
        for (int64_t i = 0; i < end - at; i++)
            found[i] = bf16 ? from_bits((uint32_t)halves[i] << 16) : numbers[i];
        return LOAD(eight, found);
    }
    if (!bf16) return LOAD(eight, numbers);
#ifdef __AVX2__
    return (eight)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves)), 16);
#else
    bits found;
    for (int i = 0; i < 8; i++) found[i] = (uint32_t)halves[i] << 16;
    return (eight)found;
#endif
}

/* Multiply keys from row `row` on, 8 or the `count` that there are, by a query, which zeros fill up. */
static inline __attribute__((always_inline)) eight
scores_of(const void *keys, const float *query, int64_t row, int64_t count, int64_t width, int bf16) {
    eight sums[KEYS];
    for (int s = 0; s < KEYS; s++) {
        int64_t at = (row + (s < count ? s : 0)) * width;
        sums[s] = ALL(0.0f);
        for (int64_t i = 0; i < width; i += 8)
            sums[s] += LOAD(eight, query + i) * load_eight(keys, at + i, at + width, bf16);
    }
    return sum_each(sums);
}

/* Sum some values of a head by their weights, 32 columns at a time. */
static inline __attribute__((always_inline)) void
sum_values(const void *values, const float *weights, int64_t row, int64_t seen, int64_t width,
           int bf16, float *y) {
    for (int64_t i = 0; i < width; i += 32) {
        eight sums[4] = {ALL(0.0f), ALL(0.0f), ALL(0.0f), ALL(0.0f)};
        for (int64_t s = 0; s < seen; s++)
            for (int part = 0; part < 4; part++) {
                int64_t at = (row + s) * width, end = at + width;
                at += i + 8 * part;
                if (at < end) sums[part] += ALL(weights[s]) * load_eight(values, at, end, bf16);
            }
        for (int64_t k = 0; k < 32 && i + k < width; k++) y[i + k] = sums[k / 8][k % 8];
    }
}

/* y = sum of exp(score - the largest) values; returns the sum of those weights. */
static inline __attribute__((always_inline)) float
attend(const struct position *about, const float *query, float *weights, int64_t ring, int64_t seen,
       int64_t width, int bf16, float *y) {
    float scale = 1.0f / sqrtf((float)width), largest = -INFINITY, total = 0;
    for (int64_t s = 0; s < seen; s += KEYS)
        STORE(weights + s, scores_of(about->keys, query, ring + s, seen - s, width, bf16) * scale);
    for (int64_t s = 0; s < seen; s++) largest = weights[s] > largest ? weights[s] : largest;
    for (int64_t s = 0; s < seen; s++) weights[s] = exponential(weights[s] - largest);
    for (int64_t s = 0; s < seen; s++) total += weights[s];
    sum_values(about->values, weights, ring, seen, width, bf16, y);
    return total;
}

/* Store key and value of a head, and attend to what is stored. */
static void attend_heads(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct position *about = given;
    int64_t width = about->width, half = width / 2, window = about->window, p = *about->position;
    int64_t slot = p % window, seen = p + 1 < window ? p + 1 : window;
    int bf16 = (int)about->bf16;
    void *const rings[3] = {NULL, about->keys, about->values};
    float *buffer = new_floats(width), *made = new_floats(width), *weights = new_floats(seen + KEYS);
    float *query = calloc((size_t)width + 8, sizeof(float));
    const float *cos = about->cos + p * half, *sin = about->sin + p * half;
    for (int64_t head = first; head < last; head++) {
        int64_t ring = head * window, new = (ring + slot) * width;
        for (int64_t part = 0; part < 3; part++) {
            int64_t at = (part * about->heads + head) * width;
            const float *x = load_row(about->qkv, at, width, bf16, buffer);
            float *to = part ? row_to_write(rings[part], new, bf16, made) : query;
            float square = sum_products(x, x, width) / (float)width + about->eps;
            if (part < 2) rotate(x, cos, sin, 1.0f, 1.0f / sqrtf(square), to, half);
            else memcpy(to, x, (size_t)width * sizeof(float));
            if (part) store_row(rings[part], new, width, bf16, to);
        }
        for (int64_t i = 0; bf16 && i < width; i++)
            query[i] = from_bits((uint32_t)to_bf16(query[i]) << 16);
        float *to = row_to_write(about->y, head * width, bf16, made), total;
        /* for the usual widths, and for any other one */
        if (width == 64) total = attend(about, query, weights, ring, seen, 64, bf16, to);
        else if (width == 128) total = attend(about, query, weights, ring, seen, 128, bf16, to);
        else total = attend(about, query, weights, ring, seen, width, bf16, to);
        for (int64_t i = 0; i < width; i++) to[i] *= 1.0f / total;
        store_row(about->y, head * width, width, bf16, to);
    }
    free(buffer), free(made), free(query), free(weights);
}

/* qkv: (3, heads, width); keys, values: (heads, window, width), changed in place; y: (heads, width). */
EXPORT void attend_position(const void *qkv, int64_t bf16, void *keys, void *values,
                            const int32_t *position, const float *cos, const float *sin, double eps,
                            void *y, int64_t heads, int64_t window, int64_t width, int64_t threads) {
    struct position about = {qkv, keys, values, y, position, cos, sin, heads, window, width, bf16,
                             (float)eps};
    share_rows(attend_heads, &about, heads, 1, threads);
}

struct table {
    struct decoding to;
    const int64_t *ids;
    int64_t ids_stride, size;
};

static void look_up_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct table *about = given;
    for (int64_t m = first; m < last; m++) {
        int64_t id = about->ids[m * about->ids_stride], wide = about->to.bf16 ? 2 : 4;
        struct decoding one = about->to;
        one.weight = (uint8_t *)one.weight + m * one.w.columns * wide;
        if (id < 0 || id >= about->size) {
            memset(one.weight, 0xFF, (size_t)(one.w.columns * wide)); /* not a number */
            continue;
        }
        one.w.trits += id * one.w.trits_stride;
        one.w.exponent += id * one.w.exponent_stride;
        if (one.w.fraction) one.w.fraction += id * one.w.fraction_stride;
        if (one.w.remainder) one.w.remainder += id * one.w.remainder_stride;
        decode_rows(&one, 0, 1, thread);
    }
}

/* y: (M, K) contiguous, of a table of `size` rows. Returns how many ids are not those of a row. */
EXPORT int64_t look_up(PACKED_ARGUMENTS, const int64_t *ids, int64_t ids_stride, int64_t size,
                       void *y, int64_t bf16, int64_t rows, int64_t threads) {
    struct table about = {{PACKED, y, bf16}, ids, ids_stride, size};
    share_rows(look_up_rows, &about, rows, 1, threads);
    int64_t outside = 0;
    for (int64_t m = 0; m < rows; m++) outside += ids[m * ids_stride] < 0 || ids[m * ids_stride] >= size;
    return outside;
}

struct counter {
    int32_t *position;
    int64_t length;
};

static void count_on(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct counter *about = given;
    *about->position += (int32_t)about->length;
}

EXPORT void count(int32_t *position, int64_t length) {
    struct counter about = {position, length};
    share_rows(count_on, &about, 1, 1, 1);
}

/* ---- inverses of Gram matrices ----------------------------------------------------------------- */

/* Matrices are made of square blocks, each in one piece, the last ones filled up by zeros. A product
 * sums over the rows of both factors, so that both are read forward. */

#define SIDE 32 /* of a block */
#define BLOCK (SIDE * SIDE)
#define PART 128 /* columns of X whose products are added at a time */

/* Of a tile that is in registers. */
#define TILE_ROWS (WIDTH == 16 ? 8 : 4)
#define TILE_VECTORS 2

/* Product and sum may be rounded at once, as the matrix library does it. */
#ifdef __clang__
#define FUSED
#define FUSE _Pragma("clang fp contract(fast)")
#else
#define FUSED __attribute__((optimize("fp-contract=fast")))
#define FUSE
#endif

/* The number of blocks before column `j` of an upper triangle that is kept column by column. */
static inline int64_t triangle(int64_t j) { return j * (j + 1) / 2; }

/* out[i][j] += factor * sum over p of x[p][i] y[p][j] */
FUSED static void add_product(float *out, const float *x, const float *y, int64_t count,
                              float factor) {
    FUSE
    for (int64_t i = 0; i < SIDE; i += TILE_ROWS)
        for (int64_t j = 0; j < SIDE; j += TILE_VECTORS * WIDTH) {
            vector sum[TILE_ROWS][TILE_VECTORS] = {0};
            for (int64_t p = 0; p < count; p++)
                for (int r = 0; r < TILE_ROWS; r++)
                    for (int c = 0; c < TILE_VECTORS; c++)
                        sum[r][c] += x[p * SIDE + i + r] * LOAD(vector, y + p * SIDE + j + c * WIDTH);
            for (int r = 0; r < TILE_ROWS; r++)
                for (int c = 0; c < TILE_VECTORS; c++) {
                    float *at = out + (i + r) * SIDE + j + c * WIDTH;
                    STORE(at, LOAD(vector, at) + factor * sum[r][c]);
                }
        }
}

/* From a positive definite block, whose eigenvalues are at least `least`, find the transpose of the
 * inverse of its Cholesky factor. The block is lost. */
FUSED static void invert_factor(float *block, float least, float *transposed) {
    FUSE
    float inverse[BLOCK] = {0};
    for (int k = 0; k < SIDE; k++) {
        float *row = block + k * SIDE, *of_inverse = inverse + k * SIDE;
        float part = 1.0f / sqrtf(row[k] < least ? least : row[k]);
        of_inverse[k] = 1.0f;
        for (int j = 0; j < SIDE; j++) row[j] *= part, of_inverse[j] *= part;
        for (int i = k + 1; i < SIDE; i++) {
            float factor = row[i], *other = block + i * SIDE, *of_other = inverse + i * SIDE;
            for (int j = 0; j < SIDE; j++) other[j] -= factor * row[j];
            for (int j = 0; j < SIDE; j++) of_other[j] -= factor * of_inverse[j];
        }
    }
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++) transposed[i * SIDE + j] = inverse[j * SIDE + i];
}

struct inverses {
    const float *x;
    float *gram, *factors, *q;
    const double *shifts, *weights;
    int64_t n_stride, m_stride, n, m, blocks, count;
    float scale;
};

/* Some blocks of X X.T. */
static void gram_blocks(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct inverses *about = given;
    int64_t n = about->n, n_stride = about->n_stride, m_stride = about->m_stride;
    float *panels = new_floats(about->blocks * PART * SIDE);
    memset(panels, 0, (size_t)(about->blocks * PART * SIDE) * sizeof(float));
    memset(about->gram + first * BLOCK, 0, (size_t)((last - first) * BLOCK) * sizeof(float));
    for (int64_t start = 0; start < about->m; start += PART) {
        int64_t count = about->m - start < PART ? about->m - start : PART;
        const float *x = about->x + start * m_stride;
        for (int64_t b = 0; b * SIDE < n; b++) {
            int64_t width = n - b * SIDE < SIDE ? n - b * SIDE : SIDE;
            float *panel = panels + b * PART * SIDE;
            const float *from = x + b * SIDE * n_stride;
            if (n_stride == 1)
                for (int64_t p = 0; p < count; p++)
                    memcpy(panel + p * SIDE, from + p * m_stride, (size_t)width * sizeof(float));
            else
                for (int64_t i = 0; i < width; i++)
                    for (int64_t p = 0; p < count; p++)
                        panel[p * SIDE + i] = from[i * n_stride + p * m_stride];
        }
        for (int64_t j = 0; j < about->blocks; j++)
            for (int64_t i = 0; i <= j; i++) {
                int64_t at = triangle(j) + i;
                if (at < first || at >= last) continue;
                const float *left = panels + i * PART * SIDE, *right = panels + j * PART * SIDE;
                add_product(about->gram + at * BLOCK, left, right, count, 1.0f);
            }
    }
    free(panels);
}

/* Find the inverses Z of the Cholesky factors of A + c_i, A the Gram matrix times `scale`.
 *
 * What makes A upper triangular, row by row, makes Z of an identity. Blocks of A are above the
 * diagonal, and those of Z on and below it. */
static void factor_inverses(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct inverses *about = given;
    int64_t blocks = about->blocks;
    float pivot[BLOCK], transposed[BLOCK];
    for (int64_t number = first; number < last; number++) {
        float *a = about->factors + number * blocks * blocks * BLOCK;
        float shift = (float)about->shifts[number];
        for (int64_t j = 0; j < blocks; j++)
            for (int64_t i = 0; i < blocks; i++) {
                float *block = a + (i * blocks + j) * BLOCK;
                const float *from = about->gram + (triangle(j) + i) * BLOCK;
                for (int at = 0; at < BLOCK; at++) block[at] = i > j ? 0.0f : from[at] * about->scale;
                for (int r = 0; i == j && r < SIDE; r++) block[r * (SIDE + 1)] += shift;
            }
        for (int64_t k = 0; k < blocks; k++) {
            float *row = a + k * blocks * BLOCK;
            memcpy(pivot, row + k * BLOCK, sizeof pivot);
            invert_factor(pivot, shift, transposed);
            for (int64_t j = 0; j < blocks; j++) {
                float *block = row + j * BLOCK, before[BLOCK];
                memcpy(before, block, sizeof before);
                memset(block, 0, sizeof before);
                if (j != k) add_product(block, transposed, before, SIDE, 1.0f);
                for (int r = 0; j == k && r < SIDE; r++)
                    for (int c = 0; c < SIDE; c++) block[r * SIDE + c] = transposed[c * SIDE + r];
            }
            for (int64_t i = k + 1; i < blocks; i++)
                for (int64_t j = 0; j < blocks; j++) {
                    float *block = a + (i * blocks + j) * BLOCK;
                    if (j <= k || j >= i)
                        add_product(block, row + i * BLOCK, row + j * BLOCK, SIDE, -1.0f);
                }
        }
    }
}

/* Some blocks of Q, and those that mirror them: an inverse is Z.T Z. */
static void add_inverses(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct inverses *about = given;
    int64_t n = about->n, blocks = about->blocks;
    for (int64_t j = 0; j < blocks; j++)
        for (int64_t i = 0; i <= j; i++) {
            int64_t at = triangle(j) + i;
            if (at < first || at >= last) continue;
            float sum[BLOCK] = {0};
            for (int64_t number = 0; number < about->count; number++) {
                const float *z = about->factors + number * blocks * blocks * BLOCK;
                float weight = (float)about->weights[1 + number] * about->scale;
                for (int64_t p = j; p < blocks; p++) {
                    const float *row = z + p * blocks * BLOCK;
                    add_product(sum, row + i * BLOCK, row + j * BLOCK, SIDE, weight);
                }
            }
            for (int r = 0; i == j && r < SIDE; r++)
                sum[r * (SIDE + 1)] += (float)about->weights[0] * about->scale;
            int64_t height = n - i * SIDE < SIDE ? n - i * SIDE : SIDE;
            int64_t width = n - j * SIDE < SIDE ? n - j * SIDE : SIDE;
            float *above = about->q + i * SIDE * n + j * SIDE, *below = about->q + j * SIDE * n + i * SIDE;
            for (int64_t r = 0; r < height; r++)
                for (int64_t c = 0; c < width; c++) above[r * n + c] = sum[r * SIDE + c];
            for (int64_t c = 0; i != j && c < width; c++)
                for (int64_t r = 0; r < height; r++) below[c * n + r] = sum[r * SIDE + c];
        }
}

/* x: (n, m), one of its strides is 1; q: (n, n) contiguous, the sum over i of
 * weights[i + 1] (X X.T / s + shifts[i])^-1, and weights[0], over sqrt(s), s = |X X.T|. */
EXPORT void gram_inverses(const float *x, int64_t n_stride, int64_t m_stride, float *q,
                          const double *shifts, const double *weights, double least_trace,
                          double least_norm, int64_t count, int64_t n, int64_t m, int64_t threads) {
    int64_t blocks = (n + SIDE - 1) / SIDE, size = triangle(blocks) * BLOCK;
    float *space = new_floats(size + count * blocks * blocks * BLOCK);
    struct inverses about = {x, space, space + size, q, shifts, weights, n_stride, m_stride,
                             n, m, blocks, count, 0.0f};
    share_rows(gram_blocks, &about, triangle(blocks), 1, threads);
    float trace = 0.0f, squares = 0.0f;
    for (int64_t i = 0; i < n; i++)
        trace += space[(triangle(i / SIDE) + i / SIDE) * BLOCK + i % SIDE * (SIDE + 1)];
    trace = trace < (float)least_trace ? (float)least_trace : trace;
    float part = 1.0f / trace;
    for (int64_t j = 0; j < blocks; j++)
        for (int64_t i = 0; i <= j; i++) {
            float *block = space + (triangle(j) + i) * BLOCK;
            for (int at = 0; at < BLOCK; at++) block[at] *= part;
            squares += (i == j ? 1.0f : 2.0f) * sum_products(block, block, BLOCK);
        }
    float norm = sqrtf(squares);
    norm = norm < (float)least_norm ? (float)least_norm : norm;
    about.scale = 1.0f / norm;
    share_rows(factor_inverses, &about, count, 1, threads);
    about.scale = 1.0f / (sqrtf(trace) * sqrtf(norm));
    share_rows(add_inverses, &about, triangle(blocks), 1, threads);
    free(space);
}

/* ---- the nearest of many codes --------------------------------------------------------------- */

#define CODES 16 /* whose products with a vector are taken one after another */

struct nearest {
    const uint8_t *q;    /* of each number, 128 more */
    const int8_t *codes;
    int32_t *best;       /* for each share and vector: the largest 2 q.c - |c|^2 */
    int64_t *places;     /* of it, the first */
    int64_t rows, width;
};

/* Processors multiply bytes without a sign by those with one. */
static int32_t byte_products(const uint8_t *x, const int8_t *y, int64_t width) {
    int32_t sum = 0;
    for (int64_t k = 0; k < width; k++) sum += (int32_t)x[k] * (int32_t)y[k];
    return sum;
}

static void nearest_of_share(const void *given, int64_t first, int64_t last, int64_t share) {
    const struct nearest *about = given;
    int64_t rows = about->rows, width = about->width;
    int32_t *best = about->best + share * rows, own[CODES];
    int64_t *places = about->places + share * rows;
    for (int64_t m = 0; m < rows; m++) best[m] = INT32_MIN, places[m] = first;
    for (int64_t begin = first; begin < last; begin += CODES) {
        int64_t number = last - begin < CODES ? last - begin : CODES;
        const int8_t *codes = about->codes + begin * width;
        for (int64_t i = 0; i < number; i++) { /* what 2 (q + 128).c has more than the score */
            int32_t sum = 0, squares = 0;
            for (int64_t k = 0; k < width; k++) {
                sum += codes[i * width + k];
                squares += (int32_t)codes[i * width + k] * (int32_t)codes[i * width + k];
            }
            own[i] = 256 * sum + squares;
        }
        for (int64_t m = 0; m < rows; m++) {
            const uint8_t *q = about->q + m * width;
            for (int64_t i = 0; i < number; i++) {
                int32_t score = 2 * byte_products(q, codes + i * width, width) - own[i];
                if (score > best[m]) best[m] = score, places[m] = begin + i;
            }
        }
    }
}

/* q: (rows, width), codes: (number, width), rows without gaps; best and places: (threads, rows),
 * the first of which is the result. */
EXPORT void nearest_codes(const uint8_t *q, const int8_t *codes, int32_t *best, int64_t *places,
                          int64_t rows, int64_t number, int64_t width, int64_t threads) {
    struct nearest about = {q, codes, best, places, rows, width};
    for (int64_t i = 0; i < threads * rows; i++) best[i] = INT32_MIN;
    share_rows(nearest_of_share, &about, number, CODES, threads);
    for (int64_t t = 1; t < threads; t++)
        for (int64_t m = 0; m < rows; m++)
            if (best[t * rows + m] > best[m])
                best[m] = best[t * rows + m], places[m] = places[t * rows + m];
}

/* ---- rounding of float weights, as arbcli/interop/rounding.py says --------------------------- */

struct rounding {
    const float *weight;
    int8_t *z;
    int32_t *v;
    const float *roots;         /* the scales in [1, 2), ascending */
    const int32_t *first;       /* of each, the least F */
    const int64_t *offsets;     /* of the places that are tried, from the least without clipping */
    int64_t count, number;      /* of roots, and of offsets */
    int64_t columns, group, largest, unit, lowest, highest, octave;
};

static int64_t held_place(const struct rounding *about, int64_t place) {
    int64_t low = about->lowest * about->count, high = (about->highest + 1) * about->count - 1;
    return place < low ? low : place > high ? high : place;
}

/* The octave of a place; the index of its root is what is left. */
static int64_t octave_of(const struct rounding *about, int64_t *place) {
    int64_t index = *place % about->count;
    index += index < 0 ? about->count : 0;
    int64_t octave = (*place - index) / about->count;
    *place = index;
    return octave;
}

/* The place of the smallest scale that is at least `least`. */
static int64_t place_above(const struct rounding *about, double least) {
    int exponent;
    double root = 2 * frexp(least, &exponent);
    int64_t low = 0, high = about->count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (about->roots[middle] < root) low = middle + 1;
        else high = middle;
    }
    return held_place(about, (exponent - 1) * about->count + low);
}

/* Round a group to levels; the result is the sum of the squared errors, halves added first. Errors
   are times `shift`, a power of two, as the squares of small and of large ones are no floats. */
static float round_to_levels(const float *restrict w, float *restrict z, float *restrict errors,
                             int64_t size, float step, float most, float shift) {
    for (int64_t k = 0; k < size; k++) {
        float level = rintf(w[k] / step);
        level = level > most ? most : level;
        level = level < -most ? -most : level;
        uint32_t bits = to_bits(level * step); /* rounded to bfloat16 as by `to_bf16` */
        float rounded = from_bits((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
        float error = (rounded - w[k]) * shift;
        z[k] = level, errors[k] = error * error;
    }
    for (int64_t rest = size, half; rest > 1; rest = half) {
        half = (rest + 1) / 2;
        for (int64_t k = 0; k < rest - half; k++) errors[k] += errors[half + k];
    }
    return errors[0];
}

static void round_groups_of_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct rounding *about = given;
    int64_t size = about->group, groups = (about->columns + size - 1) / size;
    float *w = new_floats(4 * size), *z = w + size, *best = z + size, *errors = best + size;
    float most = (float)about->largest, unit = (float)about->unit;
    for (int64_t n = first; n < last; n++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t begin = g * size, left = about->columns - begin, length = left < size ? left : size;
            memset(w, 0, (size_t)size * 4), memset(best, 0, (size_t)size * 4);
            memcpy(w, about->weight + n * about->columns + begin, (size_t)length * 4);
            float peak = 0, least = INFINITY;
            for (int64_t k = 0; k < size; k++) peak = fabsf(w[k]) > peak ? fabsf(w[k]) : peak;
            int64_t chosen = 0, from = 0, octave;
            int exponent;
            frexpf(peak, &exponent);
            exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
            float shift = ldexpf(1, -exponent);
            if (peak > 0) {
                double need = (double)peak * (double)about->unit / ((double)about->largest + 0.5);
                chosen = from = place_above(about, need);
            }
            for (int64_t i = 0; peak > 0 && i < about->number; i++) {
                int64_t place = held_place(about, from + about->offsets[i]), index = place;
                octave = octave_of(about, &index);
                float step = ldexpf(about->roots[index], (int)octave) / unit;
                float error = round_to_levels(w, z, errors, size, step, most, shift);
                if (error < least) {
                    least = error, chosen = place;
                    memcpy(best, z, (size_t)size * 4);
                }
            }
            int8_t *to = about->z + n * about->columns + begin;
            for (int64_t k = 0; k < length; k++) to[k] = (int8_t)best[k];
            octave = octave_of(about, &chosen);
            about->v[n * groups + g] =
                peak > 0 ? (int32_t)(octave * about->octave + about->first[chosen]) : 0;
        }
    free(w);
}

/* weight, z: (N, K), v: (N, groups), without gaps; finite weights. */
EXPORT void round_groups(const float *weight, int8_t *z, int32_t *v, const float *roots,
                         const int32_t *first, const int64_t *offsets, int64_t count,
                         int64_t number, int64_t rows, int64_t columns, int64_t group,
                         int64_t largest, int64_t unit, int64_t lowest, int64_t highest,
                         int64_t octave, int64_t threads) {
    struct rounding about = {weight, z,     v,       roots, first,  offsets, count, number,
                             columns, group, largest, unit,  lowest, highest, octave};
    share_rows(round_groups_of_rows, &about, rows, 1, threads);
}
