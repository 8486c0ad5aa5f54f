"""Kernels of libraries that have the interface of persia_kernels.h.

A library is loaded once per process and never unloaded. What its kernels are used for names
it as

    native:<name>:<sha256 of the library>

so that whatever names an optimizer, initial values or a policy of eviction, a message or a
checkpoint, names one library.
"""

import math

import numpy as np

from persia.errors import ConfigError, ExtensionError


cdef extern from "persia_kernels.h":
    """
    /* Libraries of version 1 end before these members. */
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
    """
    enum:
        PERSIA_KERNELS_VERSION
    const persia_initializer_t *persia_initializer_of(const persia_kernels_t *kernels) noexcept
    const persia_scorer_t *persia_scorer_of(const persia_kernels_t *kernels) noexcept

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

_libraries = {}


def is_native(name):
    return name.startswith(PREFIX)


def loaded():
    """The names of the libraries that this process has."""
    return tuple(_libraries)


def kernels_of(name):
    """The kernels of a loaded library, and the parameters of each with their defaults.

    They are called ``optimizer``, ``initializer`` and ``scorer``.
    """
    cdef NativeLibrary library = library_of(name)
    found = {}
    if library.optimizer != NULL:
        found["optimizer"] = dict(library.params)
    if library.initializer != NULL:
        found["initializer"] = dict(library.initializer_params)
    if library.scorer != NULL:
        found["scorer"] = {}
    return found


cdef NativeLibrary library_of(str name):
    library = _libraries.get(name)
    if library is None:
        raise ConfigError(f"{name}: this process has not loaded its library")
    return library


cdef NativeLibrary library_with_optimizer(str name):
    cdef NativeLibrary library = library_of(name)
    if library.optimizer == NULL:
        raise lacks(f"optimizer {name}", "an optimizer", name)
    return library


cdef NativeLibrary library_with_initializer(str name):
    cdef NativeLibrary library = library_of(name)
    if library.initializer == NULL:
        raise lacks(f"initialization {name}", "an initializer", name)
    return library


cdef NativeLibrary library_with_scorer(str name):
    cdef NativeLibrary library = library_of(name)
    if library.scorer == NULL:
        raise lacks(f"policy {name}", "a scorer", name)
    return library


cdef object lacks(str owner, str kernel, str name):
    found = " and ".join(kernels_of(name))
    return ConfigError(f"{owner}: expected a library with {kernel}, it has its {found}")


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
    if library.optimizer == NULL and library.initializer == NULL and library.scorer == NULL:
        raise ExtensionError(
            f"{library.name}: expected an optimizer, an initializer or a scorer, it has none")
    if library.optimizer != NULL:
        read_optimizer(library)
    if library.initializer != NULL:
        read_initializer(library)
    if library.scorer != NULL and (
            library.scorer.size < sizeof(persia_scorer_t) or library.scorer.score == NULL):
        raise ExtensionError(
            f"{library.name}: expected a scorer with .size = sizeof(persia_scorer_t) = "
            f"{sizeof(persia_scorer_t)} and a score, got size {library.scorer.size}")
    return 0


cdef int read_optimizer(NativeLibrary library) except -1:
    cdef const persia_optimizer_t *optimizer = library.optimizer
    if optimizer.size < sizeof(persia_optimizer_t) or optimizer.step == NULL:
        raise ExtensionError(
            f"{library.name}: expected an optimizer with .size = sizeof(persia_optimizer_t) "
            f"= {sizeof(persia_optimizer_t)} and a step, got size {optimizer.size}")
    library.params = read_params(
        f"{library.name}: optimizer", optimizer.num_params, optimizer.param_names,
        optimizer.param_defaults, ("lr", "guard"))
    return 0


cdef int read_initializer(NativeLibrary library) except -1:
    cdef const persia_initializer_t *initializer = library.initializer
    if initializer.size < sizeof(persia_initializer_t) or initializer.fill == NULL:
        raise ExtensionError(
            f"{library.name}: expected an initializer with .size = "
            f"sizeof(persia_initializer_t) = {sizeof(persia_initializer_t)} and a fill, got "
            f"size {initializer.size}")
    library.initializer_params = read_params(
        f"{library.name}: initializer", initializer.num_params, initializer.param_names,
        initializer.param_defaults, ("method",))
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
            if self.optimizer.init != NULL and width:
                self.optimizer.init(states[i], dim, &params[0])
        rows.num_rows, rows.dim, rows.values, rows.states, rows.grads = (
            3, dim, values, states, grads)
        rows.lr, rows.params = 0.01, &params[0]
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
        """Score uses of a row of a dim, each twice; what is wrong, or None."""
        cdef persia_use_t use
        cdef uint32_t first, before
        # The state as large as the row, between guards: a scorer only reads.
        words = np.full(2 * dim, _GUARD, dtype=np.uint32)
        cdef const float[::1] floats = words.view(np.float32)
        use.sign, use.draw, use.dim, use.num_state_words = 1, 7, dim, dim
        use.values, use.state = &floats[0], &floats[dim]
        for before in range(17):
            use.before, use.is_new = before % 16, before == 16
            first = self.scorer.score(&use)
            if self.scorer.score(&use) != first:
                return "score returned other classes for the same use"
        if (words != _GUARD).any():
            return "score changes the row"
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
    for dim in _TRIED_DIMS:
        problem = None
        if library.initializer != NULL:
            problem = library.try_fill(dim, initial)
        if problem is None and library.scorer != NULL:
            problem = library.try_score(dim)
        if problem is None and widths is not None and widths[dim] != NO_WIDTH:
            problem = library.try_dim(dim, widths[dim], params)
        if problem is not None:
            raise ExtensionError(f"{name}: with rows of dim {dim}, {problem}")
