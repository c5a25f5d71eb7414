/* The torch backend's loops over integers, and a few over activations, each in one pass.
 *
 * What is computed is said in the Python file of each kernel, which has the reference and the
 * arithmetic. Integers are equal to the torch backend's to the last bit. Sums of floats are taken
 * in an order that shapes alone decide: not the instruction set, and not the number of threads.
 *
 * A matrix is a pointer to its first element and a stride of its rows in elements; columns lie
 * beside each other. Integer arguments are all int64_t, so that the caller needs no prototypes.
 */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define LANES 16
#define MOST_THREADS 64

typedef float lanes __attribute__((vector_size(4 * LANES)));

/* ---- work on rows, shared among threads ---------------------------------------------------- */

typedef void (*work)(const void *about, int64_t first, int64_t last, int64_t thread);

struct share {
    work run;
    const void *about;
    int64_t rows, unit, shares, next;
};

/* Do shares until none is left. Which thread does which changes no result. */
static void take_shares(void *given) {
    struct share *all = given;
    for (;;) {
        int64_t t = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);
        if (t >= all->shares) return;
        int64_t units = (all->rows + all->unit - 1) / all->unit;
        int64_t first = units * t / all->shares * all->unit;
        int64_t last = units * (t + 1) / all->shares * all->unit;
        all->run(all->about, first, last < all->rows ? last : all->rows, t);
    }
}

static void *take_shares_in_thread(void *given) {
    take_shares(given);
    return NULL;
}

#ifdef __linux__
/* Of the OpenMP library that torch has loaded: its threads are awake already. */
extern void GOMP_parallel(void (*run)(void *), void *about, unsigned threads, unsigned flags)
    __attribute__((weak));
#define TORCH_THREADS GOMP_parallel
#else
static void (*const TORCH_THREADS)(void (*)(void *), void *, unsigned, unsigned) = NULL;
#endif

/* Split rows evenly, at multiples of `unit`. What a thread that cannot start leaves, others do. */
static void share_rows(work run, const void *about, int64_t rows, int64_t unit, int64_t threads) {
    int64_t units = (rows + unit - 1) / unit;
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    threads = threads > units ? units : threads;
    struct share all = {run, about, rows, unit, threads, 0};
    if (threads > 1 && TORCH_THREADS) {
        TORCH_THREADS(take_shares, &all, (unsigned)threads, 0);
        return;
    }
    pthread_t started[MOST_THREADS];
    int64_t running = 0;
    while (running < threads - 1 &&
           !pthread_create(&started[running], NULL, take_shares_in_thread, &all))
        running++;
    take_shares(&all);
    while (running) pthread_join(started[--running], NULL);
}

/* ---- numbers ------------------------------------------------------------------------------- */

static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

/* The words of a pair of rows: the even one has the low halves, the odd one the high halves. */
static void random_words(uint32_t *words, int64_t row, uint32_t key, int64_t columns) {
    uint32_t of_row = mix((uint32_t)row ^ key);
    for (int64_t k = 0; k < columns; k++) words[k] = mix((uint32_t)k * 0x9E3779B9u ^ of_row);
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

/* Round to bfloat16, to nearest even; what is no number stays none. */
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

static inline lanes load_lanes(const float *x) {
    lanes v;
    memcpy(&v, x, sizeof v);
    return v;
}

static float sum_lanes(lanes v) {
    float part[LANES];
    memcpy(part, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

/* Sum x[k] * y[k]: 16 sums side by side, then the rest. */
static float sum_products(const float *x, const float *y, int64_t n) {
    lanes total = {0};
    float rest = 0;
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) total += load_lanes(x + k) * load_lanes(y + k);
    for (; k < n; k++) rest += x[k] * y[k];
    return sum_lanes(total) + rest;
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

/* Pack a row; what `trits` has behind the columns has to be 0. */
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
    int64_t columns, group, radix, unit, nibble;
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
    int32_t radix = (int32_t)w->radix;
    float part = 1.0f / (float)w->unit;
    if (w->nibble)
        for (int64_t k = 0; k < w->columns; k++)
            digits[k] = (float)(trits[k] * radix + ((int8_t)(low[k] * 16) >> 4)) * part;
    else
        for (int64_t k = 0; k < w->columns; k++)
            digits[k] = (float)(trits[k] * radix + low[k]) * part;
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
        int64_t columns, int64_t group, int64_t radix, int64_t unit, int64_t nibble
#define PACKED                                                                                     \
    {trits, exponent, fraction, remainder, roots, trits_stride, exponent_stride, fraction_stride,  \
     remainder_stride, columns, group, radix, unit, nibble}

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
    uint32_t key;
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
    for (int64_t n = first; n < last; n++) {
        direction_of_row(&about->d, n, 1 << 21, u, buffer);
        if (n % 2 == 0) random_words(words, n / 2, about->key, columns);
        int8_t *state = about->moment + n * about->moment_stride;
        int half = n % 2 ? 16 : 0;
        int32_t of_row = 0;
        if (about->nibble)
            for (int64_t k = 0; k < columns; k++) {
                int32_t old = state[k] >> 4;
                int32_t random = (int32_t)(words[k] >> half & 0xFFFF);
                int32_t m = (old * decay + (u[k] * gain >> shift) + random) >> 16;
                m = m < -7 ? -7 : m > 7 ? 7 : m;
                state[k] = (int8_t)((m * 16) | (state[k] & 15));
                of_row += m * m;
            }
        else
            for (int64_t k = 0; k < columns; k++) {
                int32_t random = (int32_t)(words[k] >> half & 0xFFFF);
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
                            int64_t decay, int64_t gain, int64_t shift, int64_t nibble,
                            int64_t rows, int64_t threads) {
    int64_t squares[MOST_THREADS] = {0}, total = 0;
    struct blend about = {DIRECTION, moment, moment_stride, (uint32_t)key, (int32_t)decay,
                          (int32_t)gain, (int32_t)shift, (int32_t)nibble, squares};
    share_rows(blend_rows, &about, rows, 2, threads);
    for (int t = 0; t < MOST_THREADS; t++) total += squares[t];
    return total;
}

/* ---- the step of trits and remainders -------------------------------------------------------- */

struct step {
    struct direction d; /* without values the step is of the moment */
    uint8_t *packed;
    int8_t *remainder;
    const int8_t *moment; /* NULL: the high half of the remainder's byte */
    int64_t packed_stride, remainder_stride, moment_stride;
    uint32_t key;
    int32_t gain, shift, limit, radix, remainder_max, nibble;
    int64_t *flips; /* one for each thread */
};

static void step_rows(const void *given, int64_t first, int64_t last, int64_t thread) {
    const struct step *about = given;
    int64_t columns = about->d.columns, total = 0;
    float *buffer = new_floats(columns);
    int32_t *u = malloc((size_t)columns * 4 + 4);
    uint32_t *words = malloc((size_t)columns * 4 + 4);
    int8_t *trits = calloc((size_t)columns + 8, 1);
    int32_t gain = about->gain, shift = about->shift, limit = about->limit;
    int32_t radix = about->radix, half = radix / 2, most = radix + about->remainder_max;
    int nibble = about->nibble;
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
            int32_t random = (int32_t)(words[k] >> odd & 0xFFFF);
            int32_t low = nibble ? (int8_t)(state[k] * 16) >> 4 : state[k];
            int32_t old = trits[k], z = ((random - step) >> 16) + low + old * radix;
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
                          int64_t moment_stride, int64_t key, int64_t gain, int64_t shift,
                          int64_t limit, int64_t radix, int64_t remainder_max, int64_t nibble,
                          int64_t rows, int64_t threads) {
    int64_t flips[MOST_THREADS] = {0}, total = 0;
    struct step about = {DIRECTION, packed, remainder, moment, packed_stride, remainder_stride,
                         moment_stride, (uint32_t)key, (int32_t)gain, (int32_t)shift,
                         (int32_t)limit, (int32_t)radix, (int32_t)remainder_max, (int32_t)nibble,
                         flips};
    share_rows(step_rows, &about, rows, 2, threads);
    for (int t = 0; t < MOST_THREADS; t++) total += flips[t];
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

static void turn(const float *x, const float *cos, const float *sin, float sign, float factor,
                 float *y, int64_t half) {
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
    float *buffer = new_floats(size), *turned = new_floats(size);
    for (int64_t m = first; m < last; m++) {
        const float *cos = about->cos + m % about->length * half;
        const float *sin = about->sin + m % about->length * half;
        for (int64_t head = 0; head < 2 * heads; head++) {
            int64_t at = (m * 3 * heads + head) * size;
            const float *x = load_row(about->qkv, at, size, bf16, buffer);
            float r = 1.0f / sqrtf(sum_products(x, x, size) / (float)size + about->eps);
            turn(x, cos, sin, 1.0f, r, turned, half);
            about->r[m * 2 * heads + head] = r;
            if (bf16) store_row(about->qkv, at, size, bf16, turned);
            else memcpy((float *)about->qkv + at, turned, (size_t)size * sizeof(float));
        }
    }
    free(buffer), free(turned);
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
                    turn(grad, cos, sin, -1.0f, 1.0f, out, half);
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

/* ---- inverses of Gram matrices ----------------------------------------------------------------- */

/* Matrices are made of square blocks, each in one piece, the last ones filled up by zeros. A product
 * sums over the rows of both factors, so that both are read forward. */

#define SIDE 32 /* of a block */
#define BLOCK (SIDE * SIDE)
#define PART 128 /* columns of X whose products are added at a time */
#ifdef __AVX512F__
#define TILE_ROWS 8
#define TILE_LANES 2
#else
#define TILE_ROWS 4
#define TILE_LANES 1
#endif

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
        for (int64_t j = 0; j < SIDE; j += TILE_LANES * LANES) {
            lanes sum[TILE_ROWS][TILE_LANES] = {0};
            for (int64_t p = 0; p < count; p++)
                for (int r = 0; r < TILE_ROWS; r++)
                    for (int c = 0; c < TILE_LANES; c++)
                        sum[r][c] += x[p * SIDE + i + r] * load_lanes(y + p * SIDE + j + c * LANES);
            for (int r = 0; r < TILE_ROWS; r++)
                for (int c = 0; c < TILE_LANES; c++) {
                    float *at = out + (i + r) * SIDE + j + c * LANES;
                    lanes total = load_lanes(at) + factor * sum[r][c];
                    memcpy(at, &total, sizeof total);
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
