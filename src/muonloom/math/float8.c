/* Encodes FP32 as e4m3 in blocks and decodes it, bit for bit as float8.py does; see there for the definition.
 *
 * Memory bounds the encoder on a CPU, so each element is fetched from it once: while one row of blocks is
 * quantized from the cache, the largest magnitudes of the row of blocks below are taken, line by line.
 */
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define MAGNITUDE 0x7FFFFFFF
#define LARGEST_FINITE 0x7F7FFFFF
#define EXPONENT 0x7F800000
#define LARGEST_CODED 0x43E00000        /* 448 */
#define SMALLEST_EXPONENT (121 << 23)   /* 2^-6: below it e4m3 has fixed steps */
/* Added to the bits of 2^e, with their own 20 lower bits dropped, it makes 2^(e+20) plus 8 * (e+6) of its last
 * places. A sum with that ends in the code: rounding drops what e4m3 does not hold, to nearest even. */
#define TO_ADDEND ((20 << 23) - (121 << 3))

enum { MOST_BLOCKS = 64, TILE_BYTES = 1 << 21 };

static inline int32_t bits_of(float value) { int32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float of_bits(int32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline uint8_t encoded(float value, float scale) {
    int32_t bits = bits_of(value / scale);
    int32_t magnitude = least(bits & MAGNITUDE, LARGEST_CODED);
    int32_t exponent = most(magnitude & EXPONENT, SMALLEST_EXPONENT);
    int32_t addend = exponent + (exponent >> 20) + TO_ADDEND;
    int32_t sum = bits_of(of_bits(magnitude) + of_bits(addend));
    return (uint8_t)((sum & 0xFF) | (((uint32_t)bits >> 24) & 0x80));
}

static int32_t largest(const float *x, int64_t count, int32_t found) {
    for (int64_t j = 0; j < count; j++) found = most(found, bits_of(x[j]) & MAGNITUDE);
    return found;
}

#if defined(__AVX2__)
enum { STEP = 32 };
#define ALL _mm256_set1_epi32

static inline __m256i magnitudes8(const float *x) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)x), ALL(MAGNITUDE));
}

static inline __m256i divided8(const float *x, __m256 scale) {
    return _mm256_castps_si256(_mm256_div_ps(_mm256_loadu_ps(x), scale));
}

static inline __m256i codes8(__m256i bits) {
    __m256i magnitude = _mm256_min_epi32(_mm256_and_si256(bits, ALL(MAGNITUDE)), ALL(LARGEST_CODED));
    __m256i exponent = _mm256_max_epi32(_mm256_and_si256(magnitude, ALL(EXPONENT)), ALL(SMALLEST_EXPONENT));
    __m256i addend = _mm256_add_epi32(_mm256_add_epi32(exponent, _mm256_srli_epi32(exponent, 20)), ALL(TO_ADDEND));
    __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(addend));
    return _mm256_and_si256(_mm256_castps_si256(sum), ALL(0xFF));
}

/* Compilers narrow the codes and the signs one by one, with three shuffles each: twice the time of this. */
static inline void encode32(const float *x, uint8_t *out, __m256 scale) {
    __m256i a = divided8(x, scale), b = divided8(x + 8, scale);
    __m256i c = divided8(x + 16, scale), d = divided8(x + 24, scale);
    __m256i codes = _mm256_packus_epi16(_mm256_packus_epi32(codes8(a), codes8(b)),
                                        _mm256_packus_epi32(codes8(c), codes8(d)));
    __m256i signs = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    __m256i bytes = _mm256_or_si256(codes, _mm256_and_si256(signs, _mm256_set1_epi8(-128)));
    /* Packing works on each half of a register by itself; this puts the quarters in order. */
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)out, bytes);
}
#endif

/* Encode `count` numbers, and return the largest of `found` and of the magnitudes of as many at `below`. */
static int32_t encode_and_look(const float *restrict x, uint8_t *restrict out, float scale, int64_t count,
                               const float *restrict below, int32_t found) {
    int64_t j = 0;
#if defined(__AVX2__)
    __m256i first = ALL(found), second = first;
    __m256 scales = _mm256_set1_ps(scale);
    for (; j + STEP <= count; j += STEP) {
        first = _mm256_max_epi32(first, magnitudes8(below + j));
        second = _mm256_max_epi32(second, magnitudes8(below + j + 8));
        first = _mm256_max_epi32(first, magnitudes8(below + j + 16));
        second = _mm256_max_epi32(second, magnitudes8(below + j + 24));
        encode32(x + j, out + j, scales);
    }
    int32_t lanes[8];
    _mm256_storeu_si256((__m256i *)lanes, _mm256_max_epi32(first, second));
    for (int k = 0; k < 8; k++) found = most(found, lanes[k]);
#endif
    for (; j < count; j++) {
        found = most(found, bits_of(below[j]) & MAGNITUDE);
        out[j] = encoded(x[j], scale);
    }
    return found;
}

static float scale_of(int32_t amax, int power_of_two) {
    if (amax == 0) return 1.0f;
    float scale = of_bits(least(amax, LARGEST_FINITE)) / 448.0f;
    int32_t bits = most(bits_of(scale), 1 << 23);
    return of_bits(power_of_two ? (bits + 0x7FFFFF) & EXPONENT : bits);
}

typedef struct {
    const float *x;
    uint8_t *data;
    void *scale_inv;
    int64_t matrices, m, n, block_rows, block_columns;
    int power_of_two, scale_bytes;
} Work;

/* Where a row of blocks, counted over all matrices, starts, and how many lines it has. */
static int64_t first_line(const Work *w, int64_t row, int64_t *lines) {
    int64_t rows = ceil_div(w->m, w->block_rows), inner = row % rows * w->block_rows;
    *lines = smaller(w->block_rows, w->m - inner);
    return row / rows * w->m + inner;
}

static void encode_tile(const Work *w, int64_t first_row, int64_t end_row, int64_t first, int64_t end) {
    int64_t n = w->n, bn = w->block_columns, columns = ceil_div(n, bn), lines, lines_below = 0;
    int32_t amax[MOST_BLOCKS] = {0};
    float scales[MOST_BLOCKS];
    int64_t line = first_line(w, first_row, &lines), line_below = 0;
    for (int64_t i = 0; i < lines; i++)
        for (int64_t c = first; c < end; c++)
            amax[c - first] = largest(w->x + (line + i) * n + c * bn, smaller(bn, n - c * bn), amax[c - first]);
    for (int64_t row = first_row; row < end_row; row++, line = line_below, lines = lines_below) {
        for (int64_t c = first; c < end; c++) {
            float scale = scales[c - first] = scale_of(amax[c - first], w->power_of_two);
            if (w->scale_bytes == 1)
                ((uint8_t *)w->scale_inv)[row * columns + c] = (uint8_t)(bits_of(scale) >> 23);
            else
                ((float *)w->scale_inv)[row * columns + c] = scale;
            amax[c - first] = 0;
        }
        if (row + 1 < end_row) line_below = first_line(w, row + 1, &lines_below);
        else lines_below = 0;
        for (int64_t i = 0; i < lines || i < lines_below; i++) {
            for (int64_t c = first; c < end; c++) {
                int64_t place = (line + i) * n + c * bn, count = smaller(bn, n - c * bn);
                const float *x = w->x + place, *below = w->x + (line_below + i) * n + c * bn;
                int32_t *found = amax + (c - first);
                if (i >= lines) *found = largest(below, count, *found);
                else if (i < lines_below)
                    *found = encode_and_look(x, w->data + place, scales[c - first], count, below, *found);
                else encode_and_look(x, w->data + place, scales[c - first], count, x, 0);
            }
        }
    }
}

void muonloom_encode_float8(const float *x, uint8_t *data, void *scale_inv, int64_t matrices, int64_t m, int64_t n,
                            int64_t block_rows, int64_t block_columns, int32_t power_of_two, int32_t scale_bytes,
                            int64_t threads) {
    Work work = {x, data, scale_inv, matrices, m, n, block_rows, block_columns, power_of_two, scale_bytes};
    int64_t rows = matrices * ceil_div(m, block_rows), columns = ceil_div(n, block_columns);
    int64_t wide = TILE_BYTES / (4 * block_rows * block_columns);
    wide = wide < 1 ? 1 : smaller(wide, MOST_BLOCKS);
    int64_t tiles = ceil_div(columns, wide), strips = smaller(threads, rows);
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t k = 0; k < strips * tiles; k++) {
        int64_t strip = k / tiles, first = k % tiles * wide;
        encode_tile(&work, rows * strip / strips, rows * (strip + 1) / strips, first, smaller(first + wide, columns));
    }
}

static inline float decoded(uint8_t code) {
    int32_t magnitude = code & 0x7F;
    float number = of_bits((magnitude << 20) + (120 << 23));
    number = magnitude < 8 ? (float)magnitude * 0x1p-9f : number;
    int32_t bits = magnitude == 0x7F ? 0x7FC00000 : bits_of(number);
    return of_bits(bits | (int32_t)((uint32_t)(code & 0x80) << 24));
}

/* To nearest even; a NaN is the one that torch makes. */
static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = (uint32_t)bits_of(value);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & MAGNITUDE) > EXPONENT ? 0x7FC0 : rounded);
}

static float scale_at(const void *scale_inv, int64_t place, int scale_bytes) {
    if (scale_bytes == 4) return ((const float *)scale_inv)[place];
    uint8_t exponent = ((const uint8_t *)scale_inv)[place];
    return of_bits(exponent == 0 ? 1 << 22 : exponent == 0xFF ? 0x7FC00000 : exponent << 23);
}

static void decode_line(const uint8_t *restrict data, float *restrict out, float scale, int64_t count) {
    for (int64_t j = 0; j < count; j++) out[j] = decoded(data[j]) * scale;
}

static void decode_line_to_bfloat16(const uint8_t *restrict data, uint16_t *restrict out, float scale,
                                    int64_t count) {
    for (int64_t j = 0; j < count; j++) out[j] = to_bfloat16(decoded(data[j]) * scale);
}

void muonloom_decode_float8(const uint8_t *data, const void *scale_inv, void *out, int64_t matrices, int64_t m,
                            int64_t n, int64_t block_rows, int64_t block_columns, int32_t out_bytes,
                            int32_t scale_bytes, int64_t threads) {
    int64_t rows = ceil_div(m, block_rows), columns = ceil_div(n, block_columns);
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t line = 0; line < matrices * m; line++) {
        int64_t row = line / m * rows + line % m / block_rows;
        for (int64_t c = 0; c < columns; c++) {
            int64_t place = line * n + c * block_columns, count = smaller(block_columns, n - c * block_columns);
            float scale = scale_at(scale_inv, row * columns + c, scale_bytes);
            if (out_bytes == 4) decode_line(data + place, (float *)out + place, scale, count);
            else decode_line_to_bfloat16(data + place, (uint16_t *)out + place, scale, count);
        }
    }
}
