"""Optimizers that step whole rows: embedding and state lie side by side.

A RowOptimizer is settings plus a kernel; it holds no state of any row, so one object serves
every thread and shard. The state words of a row (4 bytes each):

    sgd                              0
    sgd, momentum > 0                dim        velocity, from 0
    adagrad                          dim        sum of squares, from initial_accumulator_value
    adagrad, vectorwise_shared       1          the same for the mean square of the whole row
    adam                             2 dim + 1  m and v, from 0, and the row's own step count
    rowwise_adam                     dim + 2    m, one v for the row, from 0, and the step count
    rmsprop                          dim        mean square, from 0
    rmsprop, momentum > 0            2 dim      and a velocity, from 0
    ftrl                             2 dim      z (see the kernel) and sum of squares, from 0
    lion                             dim        m, from 0
    nesterov                         dim        velocity, from 0
    adadelta                         2 dim      mean squares of gradients and of steps, from 0
    adamw, lamb                      2 dim + 1  as adam
    amsgrad                          3 dim + 1  as adam, and the largest v, before the count

The last five, and those of users (see ``native``), have the interface of persia_kernels.h.
"""

import copyreg
import functools
import math

import numpy as np

from persia._core.kernels.native import is_native
from persia.errors import ConfigError, DataError, ExtensionError, KernelError, did_you_mean

from libc.math cimport INFINITY
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from persia._core.base.cpu cimport isa_level
from persia._core.base.types cimport uint32_t, uint64_t
from persia._core.kernels.native cimport (
    MAX_WIDTH, NO_WIDTH, library_with, persia_optimizer_t,
)

cdef extern from "native_kernels.h" nogil:
    enum:
        PERSIA_WROTE_NAN
        PERSIA_NO_MEMORY
    const persia_step_t *persia_native_steps
    const persia_step_t *persia_trusted_steps
    void persia_watch_crashes() noexcept

cdef extern from "own_kernels.h" nogil:
    const persia_optimizer_t *persia_use_own(
        persia_optim_t *settings, const char *name) noexcept

cdef extern from "optim_kernels.h" nogil:
    enum:
        PERSIA_SGD
        PERSIA_SGD_MOMENTUM
        PERSIA_ADAGRAD
        PERSIA_ADAGRAD_ORIGINAL
        PERSIA_ADAGRAD_SHARED
        PERSIA_ADAGRAD_SHARED_ORIGINAL
        PERSIA_ADAM
        PERSIA_ROWWISE_ADAM
        PERSIA_RMSPROP
        PERSIA_RMSPROP_MOMENTUM
        PERSIA_FTRL
        PERSIA_LION
        PERSIA_NUM_KINDS
        PERSIA_NUM_LEVELS

    ctypedef struct persia_kernel_t:
        persia_step_t[PERSIA_NUM_LEVELS] steps
        uint32_t vectors
        uint32_t words

    const persia_kernel_t[PERSIA_NUM_KINDS] persia_kernels
    persia_correction_t persia_correction(const persia_optim_t *o, uint32_t t) noexcept
    double persia_power(double base, uint32_t exponent) noexcept

cdef enum:
    # 512 KiB of table; the default beta2 of 0.999 stops changing at 37,410 steps.
    MAX_CORRECTIONS = 65536

# Below half an ulp of 1: from here on 1 - beta^t is 1.
cdef double NEGLIGIBLE = 2.0 ** -54

# Largest dim, the store's: a row with Adam's state, 768 KiB here, must fit its chunk of 2 MiB.
MAX_DIM = 1 << 16
cdef enum:
    _LARGEST_DIM = 1 << 16

# name -> option -> default; None is an option without default.
OPTIONS = {
    "sgd": {"lr": None, "momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {
        "lr": 1e-2,
        "initial_accumulator_value": 0.0,
        "weight_decay": 0.0,
        "g_square_momentum": 1.0,
        "eps": 1e-10,
        "vectorwise_shared": False,
        "original_order": False,
    },
    "adam": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "rowwise_adam": {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0,
    },
    "rmsprop": {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0},
    "ftrl": {"lr": 0.1, "l1": 0.0, "l2": 0.0, "beta": 1.0, "weight_decay": 0.0},
    "lion": {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
    # The parameters of own_kernels.h, behind the learning rate in their order.
    "nesterov": {"lr": None, "momentum": 0.9, "weight_decay": 0.0},
    "adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
    "amsgrad": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "lamb": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0},
}

# Factors of running means.
_BELOW_ONE = ("beta1", "beta2", "alpha", "rho")
# Their divisor is of running means alone, from 0.
_FADING = ("adam", "rowwise_adam", "rmsprop", "adadelta", "adamw", "amsgrad", "lamb")


def unknown(what, name, known):
    """The error about a name that is none of those known."""
    hint = did_you_mean(str(name), known)
    return ConfigError(f"{what}: expected one of {', '.join(known)}, got {name!r}{hint}")


def number(owner, option, value):
    """``value`` as a finite float that f32 can hold, or a ConfigError naming ``option``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigError(f"{owner}: {option} must be a number, got {value!r}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or abs(result) > 3.4e38:
        raise ConfigError(f"{owner}: {option} must be finite in f32, got {value!r}")
    return result


def checked(owner, option, value, default):
    """``value`` as the kind of number that ``default`` is, within the option's range."""
    if isinstance(default, bool):
        if not isinstance(value, (bool, np.bool_)):
            raise ConfigError(f"{owner}: {option} must be True or False, got {value!r}")
        return bool(value)
    value = number(owner, option, value)
    if value < 0:
        raise ConfigError(f"{owner}: {option} must be at least 0, got {value!r}")
    # Compared as f32, as the kernel uses it: 1 - 1e-9 would be 1 there.
    if option in _BELOW_ONE and np.float32(value) >= 1:
        raise ConfigError(f"{owner}: {option} must be below 1, got {value!r}")
    return value


def with_defaults(owner, options, defaults):
    """Each option of ``defaults``, with the value that ``options`` give it."""
    for option in options:
        if option not in defaults:
            hint = did_you_mean(str(option), defaults)
            raise ConfigError(
                f"{owner} has no option {option!r}{hint} (it has {', '.join(defaults)})")
    values = {option: options.get(option, default) for option, default in defaults.items()}
    for option, value in values.items():
        if value is None:
            raise ConfigError(f"{owner}: {option} must be a number, it was not given")
    return values


def complete(name, options):
    """The options of optimizer ``name`` with defaults filled in, each checked."""
    if is_native(name):
        return _complete_native(name, options)
    if name not in OPTIONS:
        raise unknown("optimizer", name, OPTIONS)
    complete_options = {
        option: checked(name, option, value, OPTIONS[name][option])
        for option, value in with_defaults(name, options, OPTIONS[name]).items()
    }
    no_eps = np.float32(complete_options.get("eps", 1.0)) == 0
    # A zero gradient on a fresh row would give 0 / 0, and such rows are common here.
    if name in _FADING and no_eps:
        raise ConfigError(
            f"{name}: eps must be above 0 in f32, got {complete_options['eps']!r}"
        )
    if name == "adagrad" and no_eps:
        if np.float32(complete_options["initial_accumulator_value"]) == 0:
            raise ConfigError("adagrad: eps and initial_accumulator_value must not both be 0")
        if np.float32(complete_options["g_square_momentum"]) < 1:
            raise ConfigError(
                "adagrad: eps must be above 0 where g_square_momentum is below 1, because the "
                f"sum may then fade to 0; got {complete_options['eps']!r}"
            )
    if name == "adagrad" and complete_options["original_order"]:
        # Its first step would be lr g / sqrt(eps), which is 100,000 times as long.
        if np.float32(complete_options["initial_accumulator_value"]) == 0:
            raise ConfigError(
                "adagrad: original_order steps with the sum before a gradient, so "
                "initial_accumulator_value must be above 0; the original's is 0.01"
            )
    return complete_options


def _complete_native(name, options):
    """The learning rate and the parameters of a user's kernel, which has no bounds for them."""
    cdef NativeLibrary library = library_with("optimizer", name)
    values = with_defaults(name, options, {"lr": None, "guard": True, **library.params})
    found = {option: number(name, option, values[option]) for option in library.params}
    return {
        "lr": checked(name, "lr", values["lr"], 0.0),
        "guard": checked(name, "guard", values["guard"], True),
        **found,
    }


cdef str failure_text(int code):
    if code == PERSIA_WROTE_NAN:
        return "wrote a NaN into a row that had none, by a gradient that had none"
    if code == PERSIA_NO_MEMORY:
        return "was not called, as there is no memory for a copy of the row"
    return f"returned the error {code}"


cdef str failed_rows(uint64_t count, bint is_guarded):
    """What became of rows for which a kernel failed."""
    left = "as they were" if is_guarded else "as the kernel left them"
    return f"{count} rows are {left}, all others took their step"


cdef int kind_of(str name, dict options) except -1:
    if name == "sgd":
        return PERSIA_SGD_MOMENTUM if np.float32(options["momentum"]) else PERSIA_SGD
    if name == "rmsprop":
        return PERSIA_RMSPROP_MOMENTUM if np.float32(options["momentum"]) else PERSIA_RMSPROP
    if name == "adagrad" and options["vectorwise_shared"]:
        return PERSIA_ADAGRAD_SHARED_ORIGINAL if options["original_order"] else (
            PERSIA_ADAGRAD_SHARED)
    if name == "adagrad":
        return PERSIA_ADAGRAD_ORIGINAL if options["original_order"] else PERSIA_ADAGRAD
    return {
        "adam": PERSIA_ADAM, "rowwise_adam": PERSIA_ROWWISE_ADAM, "ftrl": PERSIA_FTRL,
        "lion": PERSIA_LION,
    }[name]


# Adam's count is a u32 that saturates. The corrections 1 - beta^t come from a table up to the t
# where they stop changing, or up to 65,536; beyond it they are computed by repeated squaring,
# with the same function, so there is no seam.
@functools.lru_cache(maxsize=16)
def _corrections(double beta1, double beta2):
    """For step counts from 1, 1 - beta1^t in double, and 1 / sqrt(1 - beta2^t) in f32.

    They are without the learning rate, because another rate may come with every update.
    """
    cdef double larger = max(beta1, beta2)
    cdef uint32_t t, count = 1
    cdef persia_optim_t settings
    memset(&settings, 0, sizeof(persia_optim_t))
    settings.beta2_exact = beta2
    while count < MAX_CORRECTIONS and persia_power(larger, count) > NEGLIGIBLE:
        count += 1
    rests = np.empty(count)
    inverse_roots = np.empty(count, dtype=np.float32)
    cdef double[::1] rests_view = rests
    cdef float[::1] roots_view = inverse_roots
    for t in range(count):
        rests_view[t] = 1.0 - persia_power(beta1, t + 1)
        roots_view[t] = persia_correction(&settings, t + 1).inverse_root
    return rests, inverse_roots


cdef class RowOptimizer:
    """An optimizer's settings, and the kernel that applies them to rows.

    Args:
        name: One of ``OPTIONS``.
        weight_bound: Every value of a row is clamped to [-weight_bound, weight_bound] after
            its step; 0 or less is no bound.
        kept_words: Words of state by dim, of an optimizer whose library is not here: rows
            that are loaded keep them, but none is created or stepped.
        **options: As in ``OPTIONS``; the defaults are the original PERSIA's.

    Raises:
        ConfigError: If the name or an option is unknown, missing or out of its range.
    """

    def __cinit__(self, name, weight_bound=0.0, *, kept_words=None, **options):
        memset(&self.settings, 0, sizeof(persia_optim_t))
        self.options = complete(name, options) if kept_words is None else options
        self.kept_words = kept_words
        self.name = name
        self.weight_bound = number(name, "weight_bound", weight_bound)
        self.settings.weight_bound = self.weight_bound if self.weight_bound > 0 else INFINITY
        self.settings.lr = self.settings.lr_exact = self.options["lr"]
        cdef bytes plain_name = name.encode()
        if kept_words is not None:
            self._use_widths(_widths_of(kept_words))
            return
        if is_native(name):
            self.library = library_with("optimizer", name)
            self.settings.native = self.library.optimizer
            self.settings.native_name = self.library.label
            self.settings.guards_rows = self.library.guards_rows
            self.settings.is_guarded = self.options["guard"] or self.library.guards_rows
            self._fill_native()
            persia_watch_crashes()
            return
        if persia_use_own(&self.settings, plain_name) != NULL:
            self._fill_native()
            return
        self.settings.kind = kind_of(name, self.options)
        given = self.options.get
        self.settings.weight_decay = self.options["weight_decay"]
        self.settings.momentum = given("momentum", 0.0)
        self.settings.eps = given("eps", 0.0)
        self.settings.g_square_momentum = given("g_square_momentum", 0.0)
        self.settings.initial_accumulator = given("initial_accumulator_value", 0.0)
        self.settings.beta = given("beta", 0.0)
        self.settings.l1 = given("l1", 0.0)
        self.settings.l2 = given("l2", 0.0)
        cdef double beta1 = given("beta1", 0.0)
        cdef double beta2 = given("alpha" if name == "rmsprop" else "beta2", 0.0)
        self.settings.beta1 = beta1
        self.settings.beta2 = beta2
        self.settings.beta1_rest = 1.0 - beta1
        self.settings.beta2_rest = 1.0 - beta2
        self.settings.beta1_exact = beta1
        self.settings.beta2_exact = beta2
        if name in ("adam", "rowwise_adam"):
            self._fill_corrections(beta1, beta2)

    def _fill_native(self):
        # The options behind the learning rate are the parameters, in their order.
        params = tuple(
            value for option, value in self.options.items() if option not in ("lr", "guard"))
        self._params = np.array([*params, 0.0])
        cdef double[::1] params_view = self._params
        self.settings.native_params = &params_view[0]
        self._use_widths(
            _own_widths(self.name) if self.library is None else self.library.widths(params))

    def _use_widths(self, widths):
        cdef const uint32_t[::1] view = widths
        self._widths = widths
        self.settings.native_widths = &view[0]

    def _fill_corrections(self, beta1, beta2):
        # The table is this object's: ``settings`` points into it for as long as the object
        # lives.
        rests, inverse_roots = _corrections(beta1, beta2)
        self._tables = np.empty((len(rests), 2), dtype=np.float32)
        np.divide(self.options["lr"], rests, out=self._tables[:, 0], casting="unsafe")
        self._tables[:, 1] = inverse_roots
        cdef float[:, ::1] table = self._tables
        self.settings.corrections = <const persia_correction_t *> &table[0, 0]
        self.settings.num_corrections = <uint32_t> table.shape[0]

    def with_lr(self, lr):
        """The same optimizer with another learning rate; it can be made at each step."""
        options = {**self.options, "lr": lr}
        return RowOptimizer(
            self.name, self.weight_bound, kept_words=self.kept_words, **options)

    def __reduce__(self):
        options = {**self.options, "kept_words": self.kept_words}
        return copyreg.__newobj_ex__, (RowOptimizer, (self.name, self.weight_bound), options)

    def __repr__(self):
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"RowOptimizer({self.name!r}, weight_bound={self.weight_bound!r}, {options})"

    cdef uint32_t state_width(self, uint32_t dim) noexcept nogil:
        cdef const persia_kernel_t *kernel = &persia_kernels[self.settings.kind]
        if self.settings.native_widths != NULL:
            return self.settings.native_widths[dim] if dim <= _LARGEST_DIM else NO_WIDTH
        return kernel.vectors * dim + kernel.words

    cdef void fill_state(self, float *state, uint32_t dim) noexcept nogil:
        """Write the state of a row that was never stepped: ``state_width(dim)`` words."""
        cdef uint32_t i
        if self.settings.native != NULL and self.settings.native.init != NULL:
            self.settings.native.init(state, dim, self.settings.native_params)
            return
        # Zero except for Adagrad; a count of 0 and 0.0f have the same bits.
        for i in range(self.state_width(dim)):
            state[i] = self.settings.initial_accumulator

    cdef int need_kernel(self, str what) except -1:
        if self.kept_words is not None:
            raise ExtensionError(
                f"{what}: the library of {self.name} was not found when its rows were loaded, "
                "which can be evaluated and dumped; to train, register the optimizer at a "
                "server that has the library")
        return 0

    cdef persia_step_t step(self) noexcept nogil:
        if self.settings.is_trusted:
            return persia_trusted_steps[isa_level()]
        if self.settings.native != NULL:
            return persia_native_steps[isa_level()]
        return persia_kernels[self.settings.kind].steps[isa_level()]

    def state_words(self, dim):
        """Number of 4-byte words of state behind a row of ``dim`` floats."""
        width = self.state_width(dim)
        if width == NO_WIDTH and self.kept_words is not None:
            raise ConfigError(
                f"optimizer {self.name}: its library is not here, and the rows loaded have no "
                f"dim {dim}")
        if width == NO_WIDTH:
            raise ConfigError(
                f"optimizer {self.name}: for dim {dim} it keeps more than {MAX_WIDTH} words of "
                "state")
        return width

    def new_state(self, dim):
        """State u32 [state_words(dim)] of a row that was never stepped, as words."""
        cdef uint32_t size = dim
        words = np.zeros(self.state_words(size), dtype=np.uint32)
        cdef uint32_t[::1] view = words
        if view.shape[0]:
            self.fill_state(<float *>&view[0], size)
        return words

    def step_rows(
        self, float[:, ::1] values not None, const float[:, ::1] grads not None, *,
        uint64_t number=0
    ):
        """Step rows f32 [n, dim + state_words(dim)] in place by gradients f32 [n, dim].

        Raises:
            DataError: If the two matrices do not fit each other; nothing is changed.
            KernelError: If a user's kernel fails; the rows that it failed for are as they were.
        """
        cdef Py_ssize_t n = grads.shape[0]
        cdef uint32_t dim = <uint32_t> grads.shape[1]
        cdef Py_ssize_t width = <Py_ssize_t>dim + self.state_width(dim)
        cdef persia_step_t kernel = self.step()
        cdef float **rows
        cdef const float **gradients
        cdef Py_ssize_t i
        cdef persia_call_t call
        self.need_kernel("a step")
        memset(&call, 0, sizeof(persia_call_t))
        call.number = number
        if values.shape[0] != n or values.shape[1] != width:
            raise DataError(
                f"{self.name}: expected rows of shape ({n}, {width}) for gradients of shape "
                f"({n}, {dim}), got ({values.shape[0]}, {values.shape[1]})"
            )
        if n == 0:
            return
        # One block for both arrays of pointers.
        rows = <float **>malloc(2 * n * sizeof(float *))
        if rows == NULL:
            raise MemoryError(f"no memory for {2 * n} row pointers")
        gradients = <const float **>(rows + n)
        with nogil:
            for i in range(n):
                rows[i] = &values[i, 0]
                gradients[i] = &grads[i, 0]
            kernel(rows, NULL, gradients, n, dim, &self.settings, &call)
            free(rows)
        if call.num_failed:
            raise KernelError(
                f"optimizer {self.name}: the kernel {failure_text(call.code)}, row "
                f"{call.first_failed}; "
                f"{failed_rows(call.num_failed, self.settings.is_guarded)}")


def _widths_of(words):
    """Words of state by dim, u32 [MAX_DIM + 1]; NO_WIDTH of other dims than the given ones."""
    found = np.full(MAX_DIM + 1, <uint32_t> NO_WIDTH, dtype=np.uint32)
    found[list(words)] = list(words.values())
    return found


@functools.cache
def _own_widths(name):
    """Words of state by dim of an optimizer of own_kernels.h."""
    cdef persia_optim_t settings
    cdef bytes plain_name = name.encode()
    cdef const persia_optimizer_t *own = persia_use_own(&settings, plain_name)
    cdef uint32_t dim
    found = np.zeros(MAX_DIM + 1, dtype=np.uint32)
    cdef uint32_t[::1] view = found
    for dim in range(1, _LARGEST_DIM + 1):
        view[dim] = own.state_width(dim, NULL)
    found.flags.writeable = False
    return found
