"""Initial values of a row: a pure function of (settings, seed, sign).

    key     = mix64(sign ^ mix64(seed))
    draw j  = mix64(key + j)                    64 bits for element j of the row
    draw i of element j = mix64(draw j + i)     gamma and poisson, which use several

    uniform            lower + (upper - lower) u, u of 52 bits in [0, 1)
    normal             inverse distribution function: Wichura, Algorithm AS 241 (PPND16),
                       Applied Statistics 37 (1988)
    truncated_normal   the same, u scaled to the probability between -2 and 2 deviations
    gamma              Marsaglia and Tsang, ACM TOMS 26 (2000)
    poisson            Knuth's products, in pieces of lambda small enough for exp(-lambda)
    native:...         the function of a user's library (see ``native``), of seed and sign
"""

import copyreg

from persia._core.kernels.native import is_native
from persia.errors import ConfigError, KernelError

from libc.math cimport sqrt
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import numpy as np

from persia._core.kernels.optim import number, unknown, with_defaults

from persia._core.base.arrays cimport check_rows
from persia._core.base.halves cimport dtype_number, half_kernels, persia_half_t
from persia._core.base.hashing cimport mix64
from persia._core.base.types cimport uint16_t, uint32_t, uint64_t
from persia._core.kernels.native cimport library_with

cdef enum:
    UNIFORM
    NORMAL
    TRUNCATED_NORMAL
    GAMMA
    POISSON
    CONSTANT
    NATIVE

_METHODS = {
    "uniform": UNIFORM,
    "normal": NORMAL,
    "truncated_normal": TRUNCATED_NORMAL,
    "gamma": GAMMA,
    "poisson": POISSON,
    "zeros": CONSTANT,
    "constant": CONSTANT,
}

# method -> option -> default; None is an option without default.
OPTIONS = {
    "uniform": {"lower": -0.01, "upper": 0.01},
    "normal": {"mean": 0.0, "standard_deviation": 0.01},
    "truncated_normal": {"mean": 0.0, "standard_deviation": 0.01},
    "gamma": {"shape": None, "scale": None},
    "poisson": {"lam": None},
    "zeros": {},
    "constant": {"value": None},
}

# A Poisson value costs lam draws; at this lam some 30 microseconds, and a row has many values.
MAX_LAM = 10_000.0

# A row that was evicted and comes back starts as it started the first time, whatever the order
# of requests, the number of servers and the machine. For the last, nothing here calls libm
# beyond ``sqrt``, which is exact: its log and exp differ by processor and version in the last
# bit. log, exp and the inverse of the normal distribution are made of + - * / alone, in double,
# and the result is rounded to f32 once.
cdef double TWO_TO_MINUS_52 = 2.0 ** -52
# ln 2 in two parts. The first ends in 32 zero bits, so its product with |e| < 2^20 is exact.
cdef double LN2_HIGH = 6.93147180369123816490e-01
cdef double LN2_LOW = 1.90821492927058770002e-10
cdef double BELOW_MINUS_2 = 0.022750131948179207    # P(z < -2) of the standard normal
cdef double POISSON_PIECE = 32.0    # exp(-32) is 1e-14: far from the smallest double


cdef extern from "kernel_crash.h":
    """
    #include <math.h>

    #include "persia_kernels.h"

    #define PERSIA_NOT_FINITE INT32_MIN

    /* Calls a kernel of a user; what cannot be a row's values is an error as well. */
    static int persia_fill_native(
        const persia_initializer_t *native, const char *name, const double *params,
        uint64_t seed, uint64_t sign, float *out, uint32_t dim)
    {
        persia_running_kernel = name;
        const int code = native->fill(out, dim, seed, sign, params);
        persia_running_kernel = NULL;
        for (uint32_t j = 0; code == 0 && j < dim; j++)
            if (!isfinite(out[j]))
                return PERSIA_NOT_FINITE;
        return code;
    }
    """
    enum:
        PERSIA_NOT_FINITE
    int persia_fill_native(
        const persia_initializer_t *native, const char *name, const double *params,
        uint64_t seed, uint64_t sign, float *out, uint32_t dim) noexcept nogil
    void persia_watch_crashes() noexcept

cdef extern from *:
    """
    /* Highest power first. Of AS 241: numerator, then denominator, near 1/2, near the ends,
     * and beyond r = 5. */
    static const double PERSIA_CENTRAL[2][8] = {
        {2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4,
         4.5921953931549871457e4, 1.3731693765509461125e4, 1.9715909503065514427e3,
         1.3314166789178437745e2, 3.3871328727963666080e0},
        {5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4,
         2.1213794301586595867e4, 5.3941960214247511077e3, 6.8718700749205790830e2,
         4.2313330701600911252e1, 1.0},
    };
    static const double PERSIA_MIDDLE[2][8] = {
        {7.74545014278341407640e-4, 2.27238449892691845833e-2,
         2.41780725177450611770e-1, 1.27045825245236838258e0, 3.64784832476320460504e0,
         5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0},
        {1.05075007164441684324e-9, 5.47593808499534494600e-4,
         1.51986665636164571966e-2, 1.48103976427480074590e-1,
         6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0,
         1.0},
    };
    static const double PERSIA_TAIL[2][8] = {
        {2.01033439929228813265e-7, 2.71155556874348757815e-5,
         1.24266094738807843860e-3, 2.65321895265761230930e-2,
         2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0,
         6.65790464350110377720e0},
        {2.04426310338993978564e-15, 1.42151175831644588870e-7,
         1.84631831751005468180e-5, 7.86869131145613259100e-4,
         1.48753612908506148525e-2, 1.36929880922735805310e-1,
         5.99832206555887937690e-1, 1.0},
    };
    /* Of artanh(s) / s - 1, in s^2. */
    static const double PERSIA_ARTANH[11] = {
        1.0 / 23.0, 1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0,
        1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0,
    };
    /* By Horner's rule, whose order of operations is part of the result. */
    static inline double persia_polynomial(const double *coefficients, int n, double x)
    {
        double value = coefficients[0];
        for (int i = 1; i < n; i++)
            value = value * x + coefficients[i];
        return value;
    }
    """
    const double[2][8] CENTRAL "PERSIA_CENTRAL"
    const double[2][8] MIDDLE "PERSIA_MIDDLE"
    const double[2][8] TAIL "PERSIA_TAIL"
    const double[11] ARTANH "PERSIA_ARTANH"
    double persia_polynomial(const double *coefficients, int n, double x) noexcept nogil


cdef inline double natural_log(double x) noexcept nogil:
    """ln x to about 1 ulp. Needs a positive normal ``x``.

    x = 2^e m with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(s), s = (m - 1) / (m + 1).
    |s| <= 0.1716, so the 11 terms leave less than 1e-17.
    """
    cdef uint64_t bits
    cdef int64_t exponent
    cdef double m, s, z, tail, e
    memcpy(&bits, &x, 8)
    exponent = <int64_t>(bits >> 52) - 1023
    bits = (bits & <uint64_t>0x000FFFFFFFFFFFFF) | <uint64_t>0x3FF0000000000000
    memcpy(&m, &bits, 8)
    if m > 1.4142135623730951:
        m *= 0.5
        exponent += 1
    e = <double>exponent
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    tail = persia_polynomial(ARTANH, 11, z)
    return e * LN2_HIGH + (2.0 * s + (2.0 * s * z * tail + e * LN2_LOW))


cdef inline double exponential(double x) noexcept nogil:
    """e^x to a few ulp for x in [-700, 700]; 0 below. Needs ``x`` <= 700.

    x = k ln 2 + r with |r| <= 0.35; the Taylor series of e^r up to r^14 leaves 1e-19.
    """
    cdef int64_t k
    cdef uint64_t bits
    cdef double r, total, scale
    cdef int i
    if x < -700.0:
        return 0.0
    k = <int64_t>(x * 1.4426950408889634 + (0.5 if x >= 0 else -0.5))
    r = (x - <double>k * LN2_HIGH) - <double>k * LN2_LOW
    total = 1.0
    for i in range(14, 0, -1):
        total = total * r / i + 1.0
    bits = <uint64_t>(k + 1023) << 52
    memcpy(&scale, &bits, 8)
    return total * scale


cdef inline double unit(uint64_t draw) noexcept nogil:
    """52 bits of ``draw`` as a double in [0, 1)."""
    return <double>(draw >> 12) * TWO_TO_MINUS_52


cdef inline double inner_unit(uint64_t draw) noexcept nogil:
    """The same, moved by half a step: in (0, 1), symmetric around 1/2, so it has a log."""
    return (<double>(draw >> 12) + 0.5) * TWO_TO_MINUS_52


cdef double normal_quantile(double p) noexcept nogil:
    """The z with P(Z < z) = ``p``, by AS 241 (PPND16), to about 1e-16. Needs 0 < p < 1."""
    cdef double q = p - 0.5
    cdef double r, upper, lower
    if -0.425 <= q <= 0.425:
        r = 0.180625 - q * q
        upper = persia_polynomial(CENTRAL[0], 8, r)
        return q * upper / persia_polynomial(CENTRAL[1], 8, r)
    r = sqrt(-natural_log(p if q < 0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        upper = persia_polynomial(MIDDLE[0], 8, r)
        lower = persia_polynomial(MIDDLE[1], 8, r)
    else:
        r -= 5.0
        upper = persia_polynomial(TAIL[0], 8, r)
        lower = persia_polynomial(TAIL[1], 8, r)
    return -upper / lower if q < 0 else upper / lower


cdef double gamma_value(uint64_t stream, double shape) noexcept nogil:
    """One gamma variate of ``shape`` > 0 and scale 1 from the draws of ``stream``.

    A shape below 1 is drawn as shape + 1 and multiplied with u^(1 / shape). A round is
    accepted with probability 0.95 or more, so draws are few.
    """
    cdef double boost = 1.0
    cdef double d, c, x, v, u
    cdef uint64_t i = 0
    if shape < 1.0:
        boost = exponential(natural_log(inner_unit(mix64(stream))) / shape)
        shape += 1.0
        i = 1
    d = shape - 1.0 / 3.0
    c = 1.0 / sqrt(9.0 * d)
    while True:
        x = normal_quantile(inner_unit(mix64(stream + i)))
        u = inner_unit(mix64(stream + i + 1))
        i += 2
        v = 1.0 + c * x
        if v <= 0.0:
            continue
        v = v * v * v
        if natural_log(u) < 0.5 * x * x + d - d * v + d * natural_log(v):
            return d * v * boost


cdef double poisson_value(uint64_t stream, double pieces, double threshold) noexcept nogil:
    """One Poisson variate: the sum of ``pieces`` ones whose exp(-lambda) is ``threshold``."""
    cdef double total = 0.0
    cdef double product
    cdef uint64_t i = 0
    while pieces > 0.0:
        product = inner_unit(mix64(stream + i))
        i += 1
        while product > threshold:
            total += 1.0
            product *= inner_unit(mix64(stream + i))
            i += 1
        pieces -= 1.0
    return total


cdef object no_values(Initializer initializer, int code, uint64_t sign):
    why = "wrote values that are not finite" if code == PERSIA_NOT_FINITE else (
        f"returned the error {code}")
    return KernelError(
        f"initialization {initializer.name}: the kernel {why}, the row of sign {sign:#018x}")


def complete(method, options):
    """The options of ``method`` with defaults filled in, each a checked float."""
    if is_native(method):
        owner = f"initialization {method}"
        known = library_with("initializer", method).initializer_params
        values = with_defaults(owner, options, known)
        return {option: number(owner, option, value) for option, value in values.items()}
    if method not in OPTIONS:
        raise unknown("initialization", method, OPTIONS)
    owner = f"initialization {method}"
    result = {}
    for option, value in with_defaults(owner, options, OPTIONS[method]).items():
        result[option] = number(owner, option, value)
        if option in ("standard_deviation", "shape", "scale", "lam") and not result[option] > 0:
            raise ConfigError(f"{owner}: {option} must be above 0, got {value!r}")
    if method == "uniform" and not np.float32(result["lower"]) < np.float32(result["upper"]):
        raise ConfigError(
            f"{owner}: lower must be below upper in f32, got {result['lower']!r} and "
            f"{result['upper']!r} (for one value, take constant)"
        )
    if method == "gamma" and result["shape"] < 1e-3:
        raise ConfigError(
            f"{owner}: shape must be at least 1e-3 (below, nearly every value is 0 in f32), "
            f"got {result['shape']!r}"
        )
    if method == "poisson" and result["lam"] > MAX_LAM:
        raise ConfigError(f"{owner}: lam must be at most {MAX_LAM}, got {result['lam']!r}")
    return result


cdef class Initializer:
    """A distribution from which rows take their first values.

    ``method`` is a key of ``OPTIONS``, or names a loaded library; options that are left out
    take the defaults there.

    Raises:
        ConfigError: If the method or an option is unknown, missing or out of its range.
    """

    def __cinit__(self, method="uniform", **options):
        self.options = complete(method, options)
        self.name = method
        self.parameters[:] = [0.0, 0.0, 0.0, 0.0]
        if is_native(method):
            self._use_library(library_with("initializer", method))
            return
        self.method = _METHODS[method]
        values = list(self.options.values())
        if self.method == UNIFORM:
            # Bounds as f32: a value is compared with what the user can store.
            values = [float(np.float32(value)) for value in values]
            values.append(float(np.nextafter(np.float32(values[1]), np.float32("-inf"))))
        elif self.method == POISSON:
            pieces = max(1.0, np.ceil(values[0] / POISSON_PIECE))
            values = [pieces, exponential(-values[0] / pieces)]
        for i, value in enumerate(values):
            self.parameters[i] = value

    def _use_library(self, NativeLibrary library):
        cdef double[::1] params = np.array([*self.options.values(), 0.0])
        self.method = NATIVE
        self.library, self._params = library, params
        self.native = library.initializer
        self.native_name = library.label
        self.native_params = &params[0]
        persia_watch_crashes()

    def __reduce__(self):
        return copyreg.__newobj_ex__, (Initializer, (self.name,), self.options)

    def __repr__(self):
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"Initializer({self.name!r}{options})"

    def __eq__(self, other):
        if not isinstance(other, Initializer):
            return NotImplemented
        return self.name == other.name and self.options == other.options

    def __hash__(self):
        return hash((self.name, tuple(self.options.items())))

    cdef int fill(
        self, uint64_t seed, uint64_t sign, float *out, uint32_t dim
    ) noexcept nogil:
        cdef uint64_t key = mix64(sign ^ mix64(seed))
        cdef double a = self.parameters[0]
        cdef double b = self.parameters[1]
        cdef double p
        cdef float last, value
        cdef uint32_t j
        if self.method == UNIFORM:
            last = <float>self.parameters[2]    # the largest f32 below upper
            b -= a
            for j in range(dim):
                value = <float>(a + b * unit(mix64(key + j)))
                # Rounding to f32 may reach upper itself.
                out[j] = value if value < last else last
        elif self.method == NORMAL:
            for j in range(dim):
                out[j] = <float>(a + b * normal_quantile(inner_unit(mix64(key + j))))
        elif self.method == TRUNCATED_NORMAL:
            for j in range(dim):
                p = BELOW_MINUS_2 + (1.0 - 2.0 * BELOW_MINUS_2) * inner_unit(mix64(key + j))
                p = normal_quantile(p)
                # The quantile's own rounding may leave the interval by an ulp.
                p = 2.0 if p > 2.0 else (-2.0 if p < -2.0 else p)
                out[j] = <float>(a + b * p)
        elif self.method == GAMMA:
            for j in range(dim):
                out[j] = <float>(b * gamma_value(mix64(key + j), a))
        elif self.method == POISSON:
            for j in range(dim):
                out[j] = <float>poisson_value(mix64(key + j), a, b)
        elif self.method == NATIVE:
            return persia_fill_native(
                self.native, self.native_name, self.native_params, seed, sign, out, dim)
        else:
            for j in range(dim):
                out[j] = <float>a
        return 0

    def values(self, seed, sign, dim):
        """First values f32 [dim] of the row of ``sign`` under ``seed`` (both u64)."""
        cdef uint64_t seed_word = seed
        cdef uint64_t sign_word = sign
        cdef uint32_t size = dim
        cdef int code
        result = np.empty(size, dtype=np.float32)
        cdef float[::1] view = result
        with nogil:
            code = self.fill(seed_word, sign_word, &view[0], size)
        if code:
            raise no_values(self, code, sign_word)
        return result

    def fill_rows(
        self, seed, const uint64_t[::1] signs not None, float[:, ::1] rows_out not None,
        dtype="float32",
    ):
        cdef uint64_t seed_word = seed
        cdef uint32_t row_dtype = dtype_number(dtype)
        cdef const persia_half_t *half = half_kernels(row_dtype) if row_dtype else NULL
        cdef uint32_t dim = <uint32_t> rows_out.shape[1]
        cdef uint16_t *rounded = NULL
        cdef Py_ssize_t i
        cdef int code = 0
        check_rows("rows_out", signs.shape[0], rows_out.shape[0], rows_out.shape[1])
        if half != NULL:
            rounded = <uint16_t *> malloc(dim * sizeof(uint16_t))
            if rounded == NULL:
                raise MemoryError(f"a row of {dim} values")
        with nogil:
            for i in range(signs.shape[0]):
                code = self.fill(seed_word, signs[i], &rows_out[i, 0], dim)
                if code:
                    break
                if half != NULL:
                    half.narrow(&rows_out[i, 0], rounded, dim)
                    half.widen(rounded, &rows_out[i, 0], dim)
        free(rounded)
        if code:
            raise no_values(self, code, signs[i])


def elementary(double x):
    """ln, exp and the normal quantile at ``x`` as used here, for tests.

    Returns:
        ``(ln x, e^x, quantile(x))``; NaN outside ln's x > 0, exp's |x| <= 700 and
        the quantile's 0 < x < 1.
    """
    nan = float("nan")
    return (
        natural_log(x) if x > 1e-300 else nan,
        exponential(x) if -700.0 <= x <= 700.0 else nan,
        normal_quantile(x) if 0.0 < x < 1.0 else nan,
    )
