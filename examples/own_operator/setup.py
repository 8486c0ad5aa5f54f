"""Builds the native module into the wheel; everything else is in pyproject.toml."""

from setuptools import setup

from persia.cpp_extension import BuildPrebuilt

setup(cmdclass={"build_py": BuildPrebuilt})
