"""Kernels of libraries that have the interface of persia_kernels.h.

A library is loaded once per process and never unloaded. What its kernels are used for names
it as

    native:<name>:<sha256 of the library>

so that whatever names an optimizer, initial values or a policy of eviction, a message or a
checkpoint, names one library. A hash of ids is called here; other kernels where rows are.
"""

import math

import numpy as np

from libc.math cimport INFINITY

from persia._core.base.arrays cimport as_ids

from persia.errors import ConfigError, ExtensionError, KernelError


cdef extern from "kernel_crash.h":
    """
    #include "persia_kernels.h"

    static int persia_call_hash(
        const persia_hash_t *native, const char *name, const uint64_t *ids, size_t num_ids,
        uint64_t *hashes)
    {
        persia_running_kernel = name;
        const int code = native->hash(ids, num_ids, hashes);
        persia_running_kernel = NULL;
        return code;
    }
    """
    int persia_call_hash(
        const persia_hash_t *native, const char *name, const uint64_t *ids, size_t num_ids,
        uint64_t *hashes) noexcept nogil
    void persia_watch_crashes() noexcept

cdef extern from "persia_kernels.h":
    """
    /* Libraries that were compiled before there was a member end before it. */
    #define PERSIA_MEMBER_OF(kernels, member)                                                 \
        ((kernels)->size < offsetof(persia_kernels_t, member) + sizeof (kernels)->member      \
             ? NULL : (kernels)->member)
    static const persia_initializer_t *persia_initializer_of(const persia_kernels_t *kernels)
    {
        return PERSIA_MEMBER_OF(kernels, initializer);
    }
    static const persia_scorer_t *persia_scorer_of(const persia_kernels_t *kernels)
    {
        return PERSIA_MEMBER_OF(kernels, scorer);
    }
    static const persia_hash_t *persia_hash_of(const persia_kernels_t *kernels)
    {
        return PERSIA_MEMBER_OF(kernels, hash);
    }
    static int persia_guards_rows(const persia_optimizer_t *optimizer)
    {
        return optimizer->size > offsetof(persia_optimizer_t, guards) && optimizer->guards;
    }
    #define PERSIA_SIZE_WITH_STEP (offsetof(persia_optimizer_t, step) + sizeof(void *))
    """
    enum:
        PERSIA_KERNELS_VERSION
        PERSIA_SIZE_WITH_STEP
        PERSIA_GUARDED_WORDS
    const persia_initializer_t *persia_initializer_of(const persia_kernels_t *kernels) noexcept
    const persia_scorer_t *persia_scorer_of(const persia_kernels_t *kernels) noexcept
    const persia_hash_t *persia_hash_of(const persia_kernels_t *kernels) noexcept
    bint persia_guards_rows(const persia_optimizer_t *optimizer) noexcept

cdef extern from "dlfcn.h" nogil:
    enum:
        RTLD_NOW
        RTLD_LOCAL
    void *dlopen(const char *path, int flags)
    void *dlsym(void *handle, const char *symbol)
    const char *dlerror()

ctypedef const persia_kernels_t *(*kernels_t)() noexcept nogil

VERSION = PERSIA_KERNELS_VERSION
PREFIX = "native:"
SYMBOL = "persia_kernels"
_MAX_PARAMS = 64
_MAX_DIM = 1 << 16
# Of a row that is tried out, before and behind it, to see what a kernel writes beside it.
_GUARD = np.uint32(0x4B1DBEEF)
_TRIED_DIMS = (1, 2, 3, 7, 8, 16, 33, 64, 128)
_TRIED_BOUND = 10.0
_LARGEST = 0xFFFFFFFFFFFFFFFF
# What rows are made of that a kernel may make NaNs of.
_HOSTILE = (
    ("state", -1e30), ("state", 3e38), ("state", np.inf), ("state", np.nan), ("last state", -1),
    ("value", np.nan), ("value", np.inf), ("value", 3e38), ("gradient", np.nan),
    ("gradient", -np.inf), ("gradient", 3e38), ("gradient", 1e-45), ("both", 3e38),
    ("both", -np.inf), ("both", 1e20), ("gradient", 0), ("value", -20),
)

cdef enum:
    _NUM_GUARDED = 70   # rows: more than PERSIA_STEP_ROWS keeps at a time
# In messages: a kernel, and what names a library for it.
_KERNELS = {
    "optimizer": ("an optimizer", "optimizer"),
    "initializer": ("an initializer", "initialization"),
    "scorer": ("a scorer", "policy"),
    "hash": ("a hash", "hash"),
}

_libraries = {}


def is_native(name):
    return isinstance(name, str) and name.startswith(PREFIX)


def loaded():
    """The names of the libraries that this process has."""
    return tuple(_libraries)


def kernels_of(name):
    """The kernels of a loaded library, and the parameters of each with their defaults.

    They are called ``optimizer``, ``initializer``, ``scorer`` and ``hash``.
    """
    return kernels_of_library(library_of(name))


cdef dict kernels_of_library(NativeLibrary library):
    found = {}
    if library.optimizer != NULL:
        found["optimizer"] = dict(library.params)
    if library.initializer != NULL:
        found["initializer"] = dict(library.initializer_params)
    if library.scorer != NULL:
        found["scorer"] = {}
    if library.hash != NULL:
        found["hash"] = {}
    return found


cdef NativeLibrary library_of(str name):
    library = _libraries.get(name)
    if library is None:
        raise ConfigError(f"{name}: this process has not loaded its library")
    return library


cdef NativeLibrary library_with(str kernel, str name):
    found = kernels_of(name)
    if kernel not in found:
        text, owner = _KERNELS[kernel]
        raise ConfigError(
            f"{owner} {name}: expected a library with {text}, it has its {' and '.join(found)}")
    return library_of(name)


def guards_rows(name):
    """Whether the optimizer of a loaded library guards its rows itself."""
    return library_with("optimizer", name).guards_rows


def hash_ids(name, ids):
    """Hash ids, u64 [n], by a loaded library; returns u64 [n].

    Raises:
        ConfigError: If the library is not loaded, or has no hash.
        KernelError: If its function returns an error.
    """
    cdef NativeLibrary library = library_with("hash", name)
    cdef const uint64_t[::1] source = as_ids(ids, "ids")
    cdef size_t n = source.shape[0]
    hashes = np.empty(n, np.uint64)
    cdef uint64_t[::1] view = hashes
    cdef const char *label = library.label
    cdef int code = 0
    persia_watch_crashes()
    if n:
        with nogil:
            code = persia_call_hash(library.hash, label, &source[0], n, &view[0])
    if code:
        raise KernelError(f"hash {name}: the function returned the error {code} for {n} ids")
    return hashes


def load(path, name):
    """Load the library at ``path`` as ``name``, unless it is loaded.

    Raises:
        ExtensionError: If it is no library, or not one of this interface.
    """
    cdef NativeLibrary library
    if name not in _libraries:
        library = NativeLibrary(name)
        read_library(library, path)
        _libraries[name] = library


cdef int read_library(NativeLibrary library, str path) except -1:
    cdef bytes encoded = path.encode()
    cdef bytes symbol = SYMBOL.encode()
    cdef const char *at = encoded
    cdef void *handle
    cdef kernels_t find
    cdef const persia_kernels_t *kernels
    with nogil:
        handle = dlopen(at, RTLD_NOW | RTLD_LOCAL)
    if handle == NULL:
        raise ExtensionError(f"{library.name}: it cannot be loaded: {last_error()}")
    find = <kernels_t> dlsym(handle, symbol)
    if find == NULL:
        raise ExtensionError(
            f"{library.name}: expected a library with a function {SYMBOL}, which "
            f"PERSIA_EXPORT_KERNELS of persia_kernels.h defines: {last_error()}")
    kernels = find()
    if kernels == NULL or kernels.version == 0:
        raise ExtensionError(f"{library.name}: {SYMBOL} returned no kernels")
    if kernels.version > PERSIA_KERNELS_VERSION:
        raise ExtensionError(
            f"{library.name}: it is of interface version {kernels.version}, this PERSIA has "
            f"{PERSIA_KERNELS_VERSION}: compile it with the persia_kernels.h that is installed "
            "here, or install the PERSIA that it was compiled with")
    library.optimizer = kernels.optimizer
    library.initializer = persia_initializer_of(kernels)
    library.scorer = persia_scorer_of(kernels)
    library.hash = persia_hash_of(kernels)
    if not kernels_of_library(library):
        raise ExtensionError(
            f"{library.name}: expected one of {', '.join(_KERNELS)}, it has none")
    if library.optimizer != NULL:
        expect(
            library, "optimizer", "step", library.optimizer.size, PERSIA_SIZE_WITH_STEP,
            library.optimizer.step != NULL)
        library.guards_rows = persia_guards_rows(library.optimizer)
        library.params = read_params(
            f"{library.name}: optimizer", library.optimizer.num_params,
            library.optimizer.param_names, library.optimizer.param_defaults, ("lr", "guard"))
    if library.initializer != NULL:
        expect(
            library, "initializer", "fill", library.initializer.size,
            sizeof(persia_initializer_t), library.initializer.fill != NULL)
        library.initializer_params = read_params(
            f"{library.name}: initializer", library.initializer.num_params,
            library.initializer.param_names, library.initializer.param_defaults, ("method",))
    if library.scorer != NULL:
        expect(
            library, "scorer", "score", library.scorer.size, sizeof(persia_scorer_t),
            library.scorer.score != NULL)
    if library.hash != NULL:
        expect(
            library, "hash", "hash", library.hash.size, sizeof(persia_hash_t),
            library.hash.hash != NULL)
    return 0


cdef int expect(
    NativeLibrary library, str kernel, str function, uint32_t size, size_t least, bint has_it
) except -1:
    """Refuse a kernel without its function, or of no size that one can have."""
    if size < least or not has_it:
        raise ExtensionError(
            f"{library.name}: expected {_KERNELS[kernel][0]} with .size = "
            f"sizeof(persia_{kernel}_t), which is at least {least}, and a {function}, got size "
            f"{size}")
    return 0


cdef str last_error():
    cdef const char *text = dlerror()
    return "unknown" if text == NULL else (<bytes> text).decode(errors="replace")


cdef dict read_params(
    str owner, uint32_t count, const char *const *names, const double *defaults, tuple taken
):
    """Parameters of a kernel, with their defaults; names ``taken`` are PERSIA's own."""
    cdef uint32_t i
    found = {}
    if count > _MAX_PARAMS:
        raise ExtensionError(
            f"{owner}: expected at most {_MAX_PARAMS} parameters, got {count}")
    if count and (names == NULL or defaults == NULL):
        raise ExtensionError(f"{owner}: {count} parameters have no names or no defaults")
    for i in range(count):
        name = (<bytes> names[i]).decode(errors="replace")
        if not name.isidentifier() or name in taken or name in found:
            raise ExtensionError(
                f"{owner}: expected parameters with names of their own, other than "
                f"{' and '.join(taken)}, got {name!r}")
        found[name] = float(defaults[i])
        if not math.isfinite(found[name]):
            raise ExtensionError(
                f"{owner}: the default of {name} must be finite, got {found[name]}")
    return found


cdef class NativeLibrary:
    """One library; ``load`` makes it."""

    def __cinit__(self, name):
        self.name = name
        parts = name.split(":")
        self.label = f"{parts[1]} (sha256 {parts[2][:12]})".encode()
        self.params = {}
        self.initializer_params = {}
        self._widths = {}

    cdef object widths(self, object params):
        """Words of state by dim, u32 [MAX_DIM + 1], asked for once per parameters.

        A kernel that answered otherwise later would write beyond its rows.
        """
        found = self._widths.get(params)
        if found is not None:
            return found
        cdef double[::1] values = np.array([*params, 0.0])
        found = np.zeros(_MAX_DIM + 1, dtype=np.uint32)
        cdef uint32_t[::1] view = found
        cdef uint32_t dim, width
        if self.optimizer.state_width != NULL:
            for dim in range(1, _MAX_DIM + 1):
                width = self.optimizer.state_width(dim, &values[0])
                view[dim] = width if width <= MAX_WIDTH else NO_WIDTH
        found.flags.writeable = False
        self._widths[params] = found
        return found

    cdef object try_dim(self, uint32_t dim, uint32_t width, const double[::1] params):
        """Step three rows of a dim; what is wrong with what the kernel did, or None."""
        cdef uint32_t stride = dim + width + 2
        cdef uint32_t i
        cdef float *values[3]
        cdef float *states[3]
        cdef const float *grads[3]
        cdef persia_block_t rows
        cdef int codes[3]
        cdef int code
        # Each row between two guards, and the state apart from the values.
        words = np.zeros((6, stride), dtype=np.uint32)
        words[:, 0] = _GUARD
        words[:3, dim + 1:] = _GUARD
        words[3:, width + 1:] = _GUARD
        floats = words.view(np.float32)
        ramp = np.linspace(-0.5, 0.5, 3 * dim, dtype=np.float32)
        floats[:3, 1:dim + 1] = ramp.reshape(3, dim)
        steps = np.linspace(0.25, -0.25, 3 * dim, dtype=np.float32).reshape(3, dim)
        cdef float[:, ::1] view = floats
        cdef float[:, ::1] gradients = steps
        for i in range(3):
            values[i] = &view[i, 1]
            states[i] = &view[3 + i, 1]
            grads[i] = &gradients[i, 0]
            codes[i] = 0
            if self.optimizer.init != NULL and width:
                self.optimizer.init(states[i], dim, &params[0])
        rows.num_rows, rows.dim, rows.values, rows.states, rows.grads = (
            3, dim, values, states, grads)
        rows.lr, rows.params, rows.bound, rows.codes = 0.01, &params[0], INFINITY, codes
        for i in range(3):
            rows.step = i
            code = self.optimizer.step(&rows)
            if code != 0:
                return f"step returned {code}"
        guards = np.concatenate([
            words[:, 0], words[:3, dim + 1:].ravel(), words[3:, width + 1:].ravel()])
        if (guards != _GUARD).any():
            return "it writes beside the row or its state"
        if not np.isfinite(floats[:3, 1:dim + 1]).all():
            return "step wrote values that are not finite"
        return None

    cdef object try_guard(
        self, uint32_t dim, uint32_t width, const double[::1] params, uint32_t offset
    ):
        """Step rows that a step may make NaNs of, together and each alone.

        The rows are ``offset`` words behind where they could be. Returns what is wrong with
        what became of them, or None.
        """
        cdef float *values[_NUM_GUARDED]
        cdef float *states[_NUM_GUARDED]
        cdef const float *grads[_NUM_GUARDED]
        cdef persia_block_t rows
        cdef uint32_t i
        cdef int code
        codes = np.zeros((2, _NUM_GUARDED), np.int32)
        cdef int[:, ::1] codes_view = codes
        start, steps = hostile_rows(self, dim, width, params)
        cdef const float[:, ::1] steps_view = steps
        # Each row behind a guard, and one behind them all.
        stride = dim + width + 1
        end = offset + _NUM_GUARDED * stride
        words = np.full((2, end + 1), _GUARD, np.uint32)
        cdef float[:, ::1] view = words.view(np.float32)
        placed = words[:, offset:end].reshape(2, _NUM_GUARDED, stride)
        placed[:, :, 1:] = start.view(np.uint32)
        rows.dim, rows.lr, rows.step, rows.params = dim, 0.01, 0, &params[0]
        rows.bound = _TRIED_BOUND
        for turn in range(2):
            for i in range(<uint32_t> _NUM_GUARDED):
                values[i] = &view[turn, offset + i * stride + 1]
                states[i], grads[i] = values[i] + dim, &steps_view[i, 0]
            rows.num_rows = 1 if turn else _NUM_GUARDED
            for i in range(0, _NUM_GUARDED, rows.num_rows):
                rows.values, rows.states, rows.grads = values + i, states + i, grads + i
                rows.codes = &codes_view[turn, i]
                code = self.optimizer.step(&rows)
                num_failed = np.count_nonzero(codes[turn, i:i + rows.num_rows])
                if (code != 0) != (num_failed > 0):
                    return f".guards is 1, but step returned {code}, and {num_failed} codes"
        return judge(start, steps, placed, codes, words[:, end])

    cdef object try_fill(self, uint32_t dim, const double[::1] params):
        """Fill rows of a dim, each one twice; what is wrong with the values, or None."""
        cdef uint32_t i
        cdef int code
        words = np.empty((2, dim + 2), dtype=np.uint32)
        floats = words.view(np.float32)
        cdef float[:, ::1] view = floats
        cdef uint64_t sign
        for sign in (0, 1, 0xFFFFFFFFFFFFFFFF):
            words.fill(_GUARD)
            for i in range(2):
                code = self.initializer.fill(&view[i, 1], dim, 7, sign, &params[0])
                if code != 0:
                    return f"fill returned {code}"
            if (words[:, [0, dim + 1]] != _GUARD).any():
                return "fill writes beside the row"
            if not np.isfinite(floats[:, 1:dim + 1]).all():
                return "fill wrote values that are not finite"
            if (words[0] != words[1]).any():
                return "fill wrote other values for the same seed and sign"
        return None

    cdef object try_score(self, uint32_t dim):
        """Score uses of a row of a dim, with state and without; what is wrong, or None."""
        cdef persia_use_t use
        cdef uint32_t first, before, words
        # Arrays of their own, so that a sanitizer sees what is read beside them. Without state
        # it is where that would be.
        values = np.linspace(-1.0, 1.0, dim, dtype=np.float32)
        state = values[::-1].copy()
        kept = values.tobytes() + state.tobytes()
        cdef const float[::1] values_view = values
        cdef const float[::1] state_view = state
        use.sign, use.draw, use.dim, use.values = 1, 7, dim, &values_view[0]
        for words in (0, dim):
            use.num_state_words = words
            use.state = &state_view[0] if words else use.values + dim
            for before in range(17):
                use.before, use.is_new = before % 16, before == 16
                first = self.scorer.score(&use)
                if self.scorer.score(&use) != first:
                    return "score returned other classes for the same use"
        if values.tobytes() + state.tobytes() != kept:
            return "score changes the row"
        return None

    cdef object try_hash(self):
        """Hash ids together, and each alone; what is wrong with the hashes, or None."""
        ids = np.array([0, 1, 2, 7, 1 << 20, 1 << 55, 1 << 63, _LARGEST], np.uint64)
        given = ids.copy()
        found = np.full(len(ids) + 2, _GUARD, np.uint64)
        alone = np.full(len(ids), _GUARD, np.uint64)
        cdef const uint64_t[::1] ids_view = given
        cdef uint64_t[::1] found_view = found
        cdef uint64_t[::1] alone_view = alone
        cdef size_t i
        cdef size_t count = len(ids)
        cdef int code = self.hash.hash(&ids_view[0], count, &found_view[1])
        for i in range(count, 0, -1):
            code = code or self.hash.hash(&ids_view[i - 1], 1, &alone_view[i - 1])
        if code != 0:
            return f"hash returned {code}"
        if (found[[0, count + 1]] != _GUARD).any() or (given != ids).any():
            return "hash writes elsewhere than to its hashes"
        if (found[1:count + 1] != alone).any():
            return "hash wrote other hashes for the same ids"
        return None


cdef tuple hostile_rows(
    NativeLibrary library, uint32_t dim, uint32_t width, const double[::1] params
):
    """Rows f32 [n, dim + width] and gradients f32 [n, dim], many at the ends of floats."""
    cdef float[::1] state = np.zeros(width + 1, np.float32)
    random = np.random.default_rng(dim)
    rows = np.zeros((_NUM_GUARDED, dim + width), np.float32)
    rows[:, :dim] = random.standard_normal((_NUM_GUARDED, dim))
    steps = random.standard_normal((_NUM_GUARDED, dim)).astype(np.float32)
    if library.optimizer.init != NULL and width:
        library.optimizer.init(&state[0], dim, &params[0])
    rows[:, dim:] = np.asarray(state)[:width]
    # Every second row is a usual one.
    for i, (part, value) in enumerate(_HOSTILE):
        row, column = 2 * i + 1, i % dim
        if part == "state":
            rows[row, dim:] = value
        elif part == "last state":
            rows[row, dim + width - min(width, 1):] = value
        elif part == "value":
            rows[row, column] = value
        elif part == "gradient":
            steps[row, column] = value
        else:
            rows[row, :dim], steps[row] = value, -value
    return rows, steps


cdef object judge(start, steps, placed, codes, ends):
    """What is wrong with rows that a kernel has guarded, by what they were before; or None."""
    dim = steps.shape[1]
    before, after = start.view(np.uint32), placed[0, :, 1:]
    values = np.ascontiguousarray(after).view(np.float32)[:, :dim]
    has_failed = codes[0] != 0
    was_finite = np.isfinite(start[:, :dim]).all(axis=1) & np.isfinite(steps).all(axis=1)
    if (placed[:, :, 0] != _GUARD).any() or (ends != _GUARD).any():
        return "it writes beside the row or its state"
    are_nan = np.isnan(placed.view(np.float32)).all(axis=0)
    is_same = (placed[0] == placed[1]) | are_nan
    if (codes[0] != codes[1]).any() or not is_same.all():
        return "a row that is alone in a call is another one, or has another code"
    if (after[has_failed] != before[has_failed]).any():
        return ".guards is 1, but a row with a code is not as it was"
    if (np.isnan(values).any(axis=1) & was_finite & ~has_failed).any():
        return ".guards is 1, but a NaN is left in a row that had none, without a code"
    if (np.abs(values[~has_failed]) > _TRIED_BOUND).any():
        return ".guards is 1, but values are beyond the bound"
    return None


def try_out(name):
    """Call each function of a loaded library on rows of several dims.

    Raises:
        ExtensionError: If it does not do what persia_kernels.h says.
    """
    cdef NativeLibrary library = library_of(name)
    params = np.array([*library.params.values(), 0.0])
    initial = np.array([*library.initializer_params.values(), 0.0])
    widths = None
    if library.optimizer != NULL:
        widths = library.widths(tuple(library.params.values()))
    if library.hash != NULL and (problem := library.try_hash()) is not None:
        raise ExtensionError(f"{name}: {problem}")
    for dim in _TRIED_DIMS:
        problem = None
        if library.initializer != NULL:
            problem = library.try_fill(dim, initial)
        if problem is None and library.scorer != NULL:
            problem = library.try_score(dim)
        if problem is None and widths is not None and widths[dim] != NO_WIDTH:
            problem = library.try_dim(dim, widths[dim], params)
            if problem is None and fits_guard(library, dim, widths[dim]):
                problem = library.try_guard(dim, widths[dim], params, 0)
        if problem is not None:
            raise ExtensionError(f"{name}: with rows of dim {dim}, {problem}")


cdef bint fits_guard(NativeLibrary library, uint32_t dim, uint32_t width):
    return library.guards_rows and dim + width <= PERSIA_GUARDED_WORDS


def try_guard(name, params, uint32_t dim, uint32_t offset):
    """Have a kernel that guards its rows step some that need it; says what is wrong, or None.

    Args:
        name: Of a loaded library with such an optimizer.
        params: Its parameters, f64 [num_params].
        dim: Of the rows.
        offset: Words by which they are moved.
    """
    cdef NativeLibrary library = library_with("optimizer", name)
    width = library.widths(tuple(params))[dim]
    if width == NO_WIDTH or not fits_guard(library, dim, width):
        return None
    return library.try_guard(dim, width, np.array([*params, 0.0]), offset)
