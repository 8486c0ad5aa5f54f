"""A command of setuptools that builds a package's modules into its wheel."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools.command.build_py import build_py

from persia._build import modules, toolchain
from persia._build.modules import BuiltForWheel
from persia.errors import ConfigError

_CALLS = (b"cached_load_prebuilt_extension", b"cached_load_arcadia_extension")


class BuildPrebuilt(build_py):  # type: ignore[misc]
    """Builds what ``cached_load_prebuilt_extension`` loads, and puts it into the wheel.

        from persia.cpp_extension import BuildPrebuilt
        setup(cmdclass={"build_py": BuildPrebuilt})

    The modules of the package that call the function are imported; each call builds, with
    portable flags, by its own builder, and the result is copied to its
    ``external_prebuilded_path`` in the wheel. So names, sources and flags stand in that call
    alone. The wheel has the tag of this interpreter and platform. An editable install builds
    nothing: the import does.
    """

    def finalize_options(self) -> None:
        """Have the wheel tagged for this platform: it holds compiled code."""
        super().finalize_options()
        self.distribution.has_ext_modules = lambda: True
        wheel: Any = self.distribution.get_command_obj("bdist_wheel", create=False)
        if wheel is not None:  # it has looked before this command was made
            wheel.root_is_pure = False

    def run(self) -> None:
        """Copy the package, then build its modules into the copy.

        Raises:
            ConfigError: If no module of the package calls the function, or the folder that it
                names is not in the package's sources.
            ExtensionError: If a module cannot be built.
        """
        super().run()
        if self.editable_mode:
            return
        callers = [
            (package, module)
            for package, module, file in self.find_all_modules()
            if any(call in Path(file).read_bytes() for call in _CALLS)
        ]
        if not callers:
            raise ConfigError(
                f"BuildPrebuilt: no module of {self.packages} calls {_CALLS[0]!r}"
            )
        root = Path(self.get_package_dir("")).absolute()
        sys.path.insert(0, str(root))
        try:
            with modules.collected_for_wheel() as built:
                for package, module in callers:
                    name = package if module == "__init__" else f"{package}.{module}"
                    importlib.import_module(name.strip("."))
        finally:
            sys.path.remove(str(root))
        self._modules = [self._copy(one, root) for one in built]

    def _copy(self, built: BuiltForWheel, root: Path) -> Path:
        try:
            place = built.place.absolute().relative_to(root)
        except ValueError:
            raise ConfigError(
                f"{built.record.module}: external_prebuilded_path {built.place} must be a "
                f"folder in {root}"
            ) from None
        folder = Path(self.build_lib, place)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / toolchain.module_file(built.record.module)
        shutil.copyfile(built.path, target)
        target.chmod(0o755)
        built.record.write(target)
        return target

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files of the package, the built modules among them."""
        made = [str(path) for path in getattr(self, "_modules", ())]
        return [*super().get_outputs(include_bytecode), *made]
