"""Run a script with the plugin, on a Megatron in which some names are others: NAME,NAME SCRIPT ...

Every source file of Megatron's is changed on its way into the interpreter, so that it works as
well as before; only the names are gone.
"""

import importlib.machinery
import re
import runpy
import sys

import megatron_adaptra


class Renaming(importlib.machinery.SourceFileLoader):
    names = b""

    def get_code(self, fullname):
        """Without Python's cache of compiled files."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def get_data(self, path):
        data = super().get_data(path)
        # A parser's own parse_args is argparse's.
        return re.sub(rb"(?<!parser\.)\b(" + self.names + rb")\b", rb"another_\1", data)


class Finder:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname.split(".")[0] != "megatron":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Renaming(spec.loader.name, spec.loader.path)
        return spec


if __name__ == "__main__":
    Renaming.names = sys.argv[1].replace(",", "|").encode()
    sys.meta_path.insert(0, Finder)
    sys.argv = sys.argv[2:]
    megatron_adaptra.register()
    runpy.run_path(sys.argv[0], run_name="__main__")
