"""Kernels of libraries that have the interface of persia_kernels.h.

A library is loaded once per process and never unloaded. Optimizers name it as

    native:<name>:<sha256 of the library>

so that whatever names an optimizer, a message or a checkpoint, names one library.
"""

import math

import numpy as np

from persia.errors import ConfigError, ExtensionError


cdef extern from "persia_kernels.h":
    enum:
        PERSIA_KERNELS_VERSION

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


def params_of(name):
    """The parameters of a loaded library, with their defaults."""
    return dict(library_of(name).params)


cdef NativeLibrary library_of(str name):
    library = _libraries.get(name)
    if library is None:
        raise ConfigError(f"optimizer {name}: this process has not loaded its library")
    return library


def load(path, name):
    """Load the library at ``path`` as optimizer ``name``, unless it is loaded.

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
    if kernels.size < sizeof(persia_kernels_t) or kernels.optimizer == NULL:
        raise ExtensionError(f"{library.name}: expected an optimizer, it has none")
    library.optimizer = kernels.optimizer
    if library.optimizer.size < sizeof(persia_optimizer_t) or library.optimizer.step == NULL:
        raise ExtensionError(
            f"{library.name}: expected an optimizer with .size = sizeof(persia_optimizer_t) "
            f"= {sizeof(persia_optimizer_t)} and a step, got size {library.optimizer.size}")
    library.params = read_params(library)
    return 0


cdef str last_error():
    cdef const char *text = dlerror()
    return "unknown" if text == NULL else (<bytes> text).decode(errors="replace")


cdef dict read_params(NativeLibrary library):
    cdef const persia_optimizer_t *optimizer = library.optimizer
    cdef uint32_t i
    found = {}
    if optimizer.num_params > _MAX_PARAMS:
        raise ExtensionError(
            f"{library.name}: expected at most {_MAX_PARAMS} parameters, got "
            f"{optimizer.num_params}")
    if optimizer.num_params and (
            optimizer.param_names == NULL or optimizer.param_defaults == NULL):
        raise ExtensionError(
            f"{library.name}: {optimizer.num_params} parameters have no names or no defaults")
    for i in range(optimizer.num_params):
        name = (<bytes> optimizer.param_names[i]).decode(errors="replace")
        if not name.isidentifier() or name in ("lr", "guard") or name in found:
            raise ExtensionError(
                f"{library.name}: expected parameters with names of their own, other than lr "
                f"and guard, got {name!r}")
        found[name] = float(optimizer.param_defaults[i])
        if not math.isfinite(found[name]):
            raise ExtensionError(
                f"{library.name}: the default of {name} must be finite, got {found[name]}")
    return found


cdef class NativeLibrary:
    """One library; ``load`` makes it."""

    def __cinit__(self, name):
        self.name = name
        parts = name.split(":")
        self.label = f"{parts[1]} (sha256 {parts[2][:12]})".encode()
        self.params = {}
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


def try_out(name):
    """Call each function of a loaded library on rows of several dims.

    Raises:
        ExtensionError: If it does not do what persia_kernels.h says.
    """
    cdef NativeLibrary library = library_of(name)
    defaults = tuple(library.params.values())
    widths = library.widths(defaults)
    params = np.array([*defaults, 0.0])
    for dim in _TRIED_DIMS:
        width = widths[dim]
        if width == NO_WIDTH:
            continue
        problem = library.try_dim(dim, width, params)
        if problem is not None:
            raise ExtensionError(f"{name}: with rows of dim {dim}, {problem}")
