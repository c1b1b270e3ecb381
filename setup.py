"""Metadata lives in pyproject.toml; the C++ engine's extension will be declared here."""

from setuptools import setup

setup()
