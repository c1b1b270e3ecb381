"""Metadata lives in pyproject.toml; this file is where the C++ engine's extension will be declared."""

from setuptools import setup

setup()
