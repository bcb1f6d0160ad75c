// QnA's aggregation on a CPU: one loop over the windows forward, one backward. See ../README.md for the equations.
//
// With -DDIM=… -DQUERIES=… -DHEADS=… -DKH=… -DKW=… -DSTACK=… the sizes are constants and the loops unroll; without them they
// come with the call. Layouts, all dense float32: scores [B, H, W, L, heads], values [B, H, W, heads, D], tables
// [kh·kw, L, heads], out and grad [B, H', W', (L,) heads, D]; mask [B, H, W] bytes or NULL.
//
// The map is cut into bands of window rows, fixed by its size alone, so that no result depends on the number of threads. Within
// a band e = exp(score − the band's maximum) is made once per pixel, and a window's weights are e·exp(bias) over their sum.
// A window that lies far below that maximum, and in the backward one whose weight is all at one tap (its gradient must be
// exactly 0), is computed again from its own maximum.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int64_t batch, height, width, out_height, out_width, stride_y, stride_x, band, threads;
  int64_t dim, queries, heads, kh, kw, stack;
} Sizes;

#ifdef DIM
#define SIZES                                                                                           \
  (void)z;                                                                                              \
  enum { D = DIM, L = QUERIES, N = HEADS, TY = KH, TX = KW, OUTS = STACK ? L : 1, J = L * N, C = N * D, \
         A = OUTS * N, T = TY * TX };
#define KNOWN_DIM DIM
#define KNOWN_HEADS HEADS
#else
#define SIZES                                                                                          \
  const int D = (int)z->dim, L = (int)z->queries, N = (int)z->heads, TY = (int)z->kh, TX = (int)z->kw, \
            OUTS = z->stack ? L : 1, J = L * N, C = N * D, A = OUTS * N, T = TY * TX;                  \
  (void)L, (void)J, (void)TY, (void)TX, (void)A, (void)T, (void)C, (void)OUTS;
#define KNOWN_DIM 1
#define KNOWN_HEADS 1
#endif

// Several channels of a head at once (V), several heads at once (U), as far as the sizes allow.
typedef float Float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Float4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Int8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Int4 __attribute__((vector_size(16), aligned(4), may_alias));

#if KNOWN_DIM % 8 == 0
#define WIDE 8
typedef Float8 V;
#elif KNOWN_DIM % 4 == 0
#define WIDE 4
typedef Float4 V;
#else
#define WIDE 1
typedef float V;
#endif

#if KNOWN_HEADS % 8 == 0
#define MANY 8
typedef Float8 U;
typedef Int8 I;
#elif KNOWN_HEADS % 4 == 0
#define MANY 4
typedef Float4 U;
typedef Int4 I;
#else
#define MANY 1
typedef float U;
typedef int32_t I;
#endif

#define GET(pointer) (*(const U *)(pointer))
#define PUT(pointer) (*(U *)(pointer))

typedef union { U f; I i; } Bits;

static inline U choose(I mask, U yes, U no) {
#if MANY > 1
  const Bits a = {.f = yes}, b = {.f = no};
  const Bits c = {.i = (mask & a.i) | (~mask & b.i)};
  return c.f;
#else
  return mask ? yes : no;
#endif
}

static inline U larger(U a, U b) { return choose(a > b, a, b); }

static inline int any(I mask) {
#if MANY > 1
  const union { I all; int64_t part[MANY / 2]; } bits = {mask};
  int64_t found = 0;
  for (int i = 0; i < MANY / 2; i++) found |= bits.part[i];
  return found != 0;
#else
  return mask;
#endif
}

// e^x for x ≤ 0 to about 1 ulp, 0 below −87 and at −∞; NaN stays.
static inline U exponential(U x) {
  const U zero = {0.0f}, safe = choose(x < -87.0f, zero - 87.0f, x);
  const Bits shifted = {.f = safe * 1.44269504f + 12582912.0f};  // the nearest integer, in the lowest bits
  const U n = shifted.f - 12582912.0f;
  U r = safe - n * 0.693359375f;
  r += n * 2.12194440e-4f;
  U p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Bits power = {.i = (shifted.i - (0x4b400000 - 127)) << 23};
  return choose(x < -87.0f, zero, p * power.f);
}

typedef struct {
  const float *scores, *bias, *ebias;  // one image's scores; the bias, and exp(bias − its maximum over the taps)
  const uint8_t *mask;                 // one image's, or NULL
  float *e;                            // of the band's pixels
  int64_t first, last;                 // the band's rows of pixels
} Band;

// Rows of pixels that the windows of rows [y, end) see.
static void see(const Sizes *z, Band *b, int64_t y, int64_t end) {
  const int64_t above = (z->kh - 1) / 2, last = (end - 1) * z->stride_y - above + z->kh;
  b->first = y * z->stride_y - above;
  if (b->first < 0) b->first = 0;
  b->last = last > z->height ? z->height : last;
}

static void exponentials(const Sizes *z, Band *b) {
  SIZES
  const int64_t from = b->first * z->width, to = b->last * z->width;
  for (int j = 0; j < J; j += MANY) {
    U most = {0.0f};
    most -= INFINITY;
    for (int64_t at = from; at < to; at++)
      if (!b->mask || b->mask[at]) most = larger(GET(b->scores + at * J + j), most);
    for (int64_t at = from; at < to; at++)
      if (!b->mask || b->mask[at]) PUT(b->e + (at - from) * J + j) = exponential(GET(b->scores + at * J + j) - most);
  }
}

// The pixels and taps of window (y, x) that may be seen; returns their number.
static inline int look(const Sizes *z, const Band *b, int64_t y, int64_t x, int64_t *restrict pixel, int *restrict tap) {
  SIZES
  const int64_t y0 = y * z->stride_y - (TY - 1) / 2, x0 = x * z->stride_x - (TX - 1) / 2;
  int n = 0;
  if (!b->mask && y0 >= 0 && x0 >= 0 && y0 + TY <= z->height && x0 + TX <= z->width) {
    for (int ty = 0; ty < TY; ty++)
      for (int tx = 0; tx < TX; tx++, n++) {
        pixel[n] = (y0 + ty) * z->width + x0 + tx;
        tap[n] = n;
      }
    return n;
  }
  for (int ty = 0; ty < TY; ty++)
    for (int tx = 0; tx < TX; tx++) {
      const int64_t yy = y0 + ty, xx = x0 + tx, at = yy * z->width + xx;
      if (yy < 0 || xx < 0 || yy >= z->height || xx >= z->width || (b->mask && !b->mask[at])) continue;
      pixel[n] = at;
      tap[n++] = ty * TX + tx;
    }
  return n;
}

// The softmax weights p [n, J] of a window.
static inline void weigh(const Sizes *z, const Band *b, int n, const int64_t *restrict pixel, const int *restrict tap,
                         int strict, float *restrict p) {
  SIZES
  const float *e = b->e - b->first * z->width * J;
  const float share = strict ? 0.9998f : 2.0f;
  U total[J / MANY], squares[J / MANY];
  for (int j = 0; j < J / MANY; j++) total[j] = squares[j] = (U){0.0f};
  for (int i = 0; i < n; i++) {
    const float *from = e + pixel[i] * J, *factor = b->ebias + tap[i] * J;
    for (int j = 0; j < J / MANY; j++) {
      const U q = GET(from + j * MANY) * GET(factor + j * MANY);
      PUT(p + i * J + j * MANY) = q;
      total[j] += q;
      if (strict) squares[j] += q * q;
    }
  }
  I again = total[0] < 1e-6f;
  for (int j = 0; j < J / MANY; j++) again |= (total[j] < 1e-6f) | (squares[j] > share * (total[j] * total[j]));
  if (any(again))
    for (int j = 0; j < J / MANY; j++) {
      U most = (U){0.0f} - INFINITY;
      for (int i = 0; i < n; i++)
        most = larger(GET(b->scores + pixel[i] * J + j * MANY) + GET(b->bias + tap[i] * J + j * MANY), most);
      total[j] = (U){0.0f};
      for (int i = 0; i < n; i++) {
        const U q = exponential(GET(b->scores + pixel[i] * J + j * MANY) + GET(b->bias + tap[i] * J + j * MANY) - most);
        PUT(p + i * J + j * MANY) = q;
        total[j] += q;
      }
    }
  for (int j = 0; j < J / MANY; j++) total[j] = 1.0f / total[j];
  for (int i = 0; i < n; i++)
    for (int j = 0; j < J / MANY; j++) PUT(p + i * J + j * MANY) *= total[j];
}

// a [n, A] = Σ_d grad·values of each tap.
static inline void products(const Sizes *z, const float *restrict grad, const float *restrict values,
                            const int64_t *restrict pixel, int n, float *restrict a) {
  SIZES
  for (int i = 0; i < n; i++) {
    const float *v = values + pixel[i] * C;
#if WIDE == 8 && MANY == 8
    for (int o = 0; o < A; o += 8) {
      V x[8];
      for (int h = 0; h < 8; h++) {
        const V *g = (const V *)(grad + (o + h) * D), *r = (const V *)(v + (o % N + h) * D);
        x[h] = g[0] * r[0];
        for (int d = 1; d < D / 8; d++) x[h] += g[d] * r[d];
      }
#define PAIRS(a, b) (__builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + \
                     __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#define FOURS(a, b) (__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + \
                     __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
      const V low = FOURS(PAIRS(x[0], x[1]), PAIRS(x[2], x[3])), high = FOURS(PAIRS(x[4], x[5]), PAIRS(x[6], x[7]));
      PUT(a + i * A + o) = __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
                           __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#else
    for (int o = 0; o < A; o++) {
      V sum = {0.0f};
      for (int d = 0; d < D; d += WIDE) sum += *(const V *)(grad + o * D + d) * *(const V *)(v + o % N * D + d);
#if WIDE > 1
      float total = 0.0f;
      for (int d = 0; d < WIDE; d++) total += sum[d];
      a[i * A + o] = total;
#else
      a[i * A + o] = sum;
#endif
    }
#endif
  }
}

// A band of windows [y, end) of one image.
__attribute__((noinline)) static void forward_band(const Sizes *z, const Band *b, const float *values, const float *scale, float *out, int64_t y,
                         int64_t end) {
  SIZES
  float p[T * J];
  int64_t pixel[T];
  int tap[T];
  for (; y < end; y++)
    for (int64_t x = 0; x < z->out_width; x++) {
      const int n = look(z, b, y, x, pixel, tap);
      weigh(z, b, n, pixel, tap, 0, p);
      // What acts on the values takes the place of the weights, in the first A of their J.
      for (int i = 0; i < n; i++)
        for (int o = 0; o < A; o += MANY) {
          U w = GET(p + i * J + o) * GET(scale + tap[i] * J + o);
          for (int j = o + A; j < J; j += A) w += GET(p + i * J + j) * GET(scale + tap[i] * J + j);
          PUT(p + i * J + o) = w;
        }
      float *to = out + (y * z->out_width + x) * A * D;
      for (int o = 0; o < A; o++)
        for (int d = 0; d < D; d += WIDE) {
          V sum = {0.0f};
          for (int i = 0; i < n; i++) sum += p[i * J + o] * *(const V *)(values + pixel[i] * C + o % N * D + d);
          *(V *)(to + o * D + d) = sum;
        }
    }
}

// The same band's shares of the gradients, added to dscores, dvalues (one image's) and the tables' sums.
__attribute__((noinline)) static void backward_band(const Sizes *z, const Band *b, const float *values, const float *scale, const float *grad,
                          float *dscores, float *dvalues, double *dbias, double *dscale, int64_t y, int64_t end) {
  SIZES
  float p[T * J], a[T * A], ka[T * J], row_bias[T * J], row_scale[T * J];
  int64_t pixel[T];
  int tap[T];
  for (; y < end; y++) {
    memset(row_bias, 0, sizeof(float) * T * J);
    memset(row_scale, 0, sizeof(float) * T * J);
    for (int64_t x = 0; x < z->out_width; x++) {
      const int n = look(z, b, y, x, pixel, tap);
      const float *g = grad + (y * z->out_width + x) * A * D;
      weigh(z, b, n, pixel, tap, 1, p);
      products(z, g, values, pixel, n, a);
      for (int i = 0; i < n; i++)
        for (int j = 0; j < J; j += MANY) PUT(ka + i * J + j) = GET(scale + tap[i] * J + j) * GET(a + i * A + j % A);
      // From here on the products are numbers in memory: fused with the difference below, all the weight at one tap would not
      // give exactly 0.
      __asm__ volatile("" : : "r"(ka) : "memory");
      for (int o = 0; o < A; o += MANY)
        for (int j = o; j < J; j += A) {
          U delta = {0.0f};
          for (int i = 0; i < n; i++) delta += GET(p + i * J + j) * GET(ka + i * J + j);
          for (int i = 0; i < n; i++) {
            const U q = GET(p + i * J + j), t = q * (GET(ka + i * J + j) - delta);
            U w = q * GET(scale + tap[i] * J + j);
            if (j > o) w += GET(p + i * J + o);
            PUT(dscores + pixel[i] * J + j) += t;
            PUT(row_bias + tap[i] * J + j) += t;
            PUT(row_scale + tap[i] * J + j) += q * GET(a + i * A + o);
            PUT(p + i * J + o) = w;
          }
        }
      for (int o = 0; o < A; o++)
        for (int d = 0; d < D; d += WIDE) {
          const V one = *(const V *)(g + o * D + d);
          for (int i = 0; i < n; i++) *(V *)(dvalues + pixel[i] * C + o % N * D + d) += p[i * J + o] * one;
        }
    }
    for (int i = 0; i < T * J; i++) {
      dbias[i] += row_bias[i];
      dscale[i] += row_scale[i];
    }
  }
}

static float *band_memory(const Sizes *z) {
  const int64_t rows = (z->band - 1) * z->stride_y + z->kh;
  return malloc(sizeof(float) * (size_t)((rows < z->height ? rows : z->height) * z->width * z->queries * z->heads));
}

// Both return 0, or 1 where there was no memory. ebias = exp(bias − its maximum over the taps).
int qna_forward(const Sizes *z, const float *scores, const float *values, const float *bias, const float *ebias,
                const float *scale, const uint8_t *mask, float *out) {
  const int64_t bands = (z->out_height + z->band - 1) / z->band, pixels = z->height * z->width;
  int failed = 0;
#pragma omp parallel num_threads((int)z->threads) if (z->threads > 1) reduction(| : failed)
  {
    float *e = band_memory(z);
    failed |= e == NULL;
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < z->batch * bands; c++) {
      const int64_t image = c / bands, y = c % bands * z->band;
      const int64_t end = y + z->band < z->out_height ? y + z->band : z->out_height;
      if (!e) continue;
      Band b = {scores + image * pixels * z->queries * z->heads, bias, ebias, mask ? mask + image * pixels : NULL, e, 0, 0};
      see(z, &b, y, end);
      exponentials(z, &b);
      forward_band(z, &b, values + image * pixels * z->heads * z->dim, scale,
                   out + image * z->out_height * z->out_width * (z->stack ? z->queries : 1) * z->heads * z->dim, y, end);
    }
    free(e);
  }
  return failed;
}

// dscores and dvalues must be zero; partial is [groups, 2, kh·kw·L·heads] zeros, its sum the gradients of bias and scale.
// Bands of even and of odd number take turns: two of the same kind share no pixel.
int qna_backward(const Sizes *z, const float *scores, const float *values, const float *bias, const float *ebias,
                 const float *scale, const uint8_t *mask, const float *grad, float *dscores, float *dvalues,
                 double *partial, int64_t groups) {
  const int64_t bands = (z->out_height + z->band - 1) / z->band, pixels = z->height * z->width;
  const int64_t table = z->kh * z->kw * z->queries * z->heads;
  int failed = 0;
#pragma omp parallel num_threads((int)z->threads) if (z->threads > 1) reduction(| : failed)
  {
    float *e = band_memory(z);
    failed |= e == NULL;
    for (int turn = 0; turn < 2; turn++) {
      const int64_t mine = (bands + 1 - turn) / 2, all = z->batch * mine;
#pragma omp for schedule(dynamic, 1)
      for (int64_t group = 0; group < groups; group++)
        for (int64_t c = all * group / groups; c < all * (group + 1) / groups; c++) {
          const int64_t image = c / mine, y = (c % mine * 2 + turn) * z->band;
          const int64_t end = y + z->band < z->out_height ? y + z->band : z->out_height;
          const int64_t one = z->queries * z->heads, channels = z->heads * z->dim;
          if (!e) continue;
          Band b = {scores + image * pixels * one, bias, ebias, mask ? mask + image * pixels : NULL, e, 0, 0};
          see(z, &b, y, end);
          exponentials(z, &b);
          backward_band(z, &b, values + image * pixels * channels, scale,
                        grad + image * z->out_height * z->out_width * (z->stack ? z->queries : 1) * channels,
                        dscores + image * pixels * one, dvalues + image * pixels * channels,
                        partial + group * 2 * table, partial + (group * 2 + 1) * table, y, end);
        }
    }
    free(e);
  }
  return failed;
}
