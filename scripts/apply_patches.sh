#!/usr/bin/env bash
# Our two statements in pretrain_gpt.py of a Megatron-LM checkout: in, out, or is it in? See --help.
set -euo pipefail

usage() {
  cat <<'END'
scripts/apply_patches.sh CHECKOUT             put our lines into CHECKOUT/pretrain_gpt.py
scripts/apply_patches.sh CHECKOUT --revert    take them out: the file is again what it was
scripts/apply_patches.sh CHECKOUT --check     change nothing, say "patched" or "not patched, the
                                              patch fits" (exit status 0), or why neither (1)

CHECKOUT is a Megatron-LM checkout or an unpacked archive of one. Its release line chooses the
patch from patches/; one that lies in $ADAPTRA_PATCHES instead is taken from there. The patch is
for one exact pretrain_gpt.py: for one with your own changes, make your own patch:

  scripts/make_patches.py CHECKOUT --out FOLDER
  ADAPTRA_PATCHES=FOLDER scripts/apply_patches.sh CHECKOUT

Exit status: 0 done, or nothing to do; 1 it failed, or the answer of --check is no;
2 refused: nothing has been changed, and one line on stderr says why.
END
}

die() {
  echo "apply_patches: error: $2" >&2
  exit "$1"
}
# In an answer of --check, what would be refused is a no.
refuse() { if [ "$mode" = check ]; then die 1 "$1"; else die 2 "$1"; fi; }

# A git that looks at files and at no repository: the checkout may lie in another one, from
# which `git apply` would silently skip the file, or which may name blobs by other hashes.
plain_git() { GIT_DIR=/dev/null git "$@"; }
# The blob id of a file as it is in the repository, where lines end in LF.
blob() { sed $'s/\r$//' "$1" | plain_git hash-object --stdin; }
# number NAME: the value of NAME in megatron-core's own account of its version.
number() { sed -n "/^$1 *= *[0-9]/{s/^$1 *= *\([0-9]*\).*/\1/p;q;}" "$checkout/$info"; }

mode=apply checkout=""
for word in "$@"; do
  case $word in
    -h | --help) usage && exit ;;
    --revert | --check)
      [ "$mode" = apply ] || die 2 "--revert and --check exclude each other, and come once"
      mode=${word#--}
      ;;
    -*) die 2 "unknown option $word; there are --revert, --check and --help" ;;
    *)
      [ -z "$checkout" ] || die 2 "one CHECKOUT at a time; got '$checkout' and '$word'"
      checkout=$word
      ;;
  esac
done
[ -n "$checkout" ] || die 2 "which CHECKOUT? See scripts/apply_patches.sh --help"
command -v git >/dev/null || die 2 "git is not installed"
# A git hook sets these for its own repository.
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_COMMON_DIR GIT_OBJECT_DIRECTORY CDPATH

given=$checkout info=megatron/core/package_info.py script=pretrain_gpt.py
[ -d "$given" ] || refuse "$given is not a Megatron-LM checkout: there is no such folder"
checkout=$(cd -- "$given" && pwd -P)
for name in $info $script; do
  [ -f "$checkout/$name" ] || refuse "$given is not a Megatron-LM checkout: it has no $name"
done
[ ! -L "$checkout/$script" ] || refuse "$given/$script is a symbolic link; give the checkout it leads to"

folder=${ADAPTRA_PATCHES:-$(dirname -- "$(readlink -f -- "$0")")/../patches}
[ -d "$folder" ] || die 2 "there is no folder of patches $folder (ADAPTRA_PATCHES)"
folder=$(cd -- "$folder" && pwd -P)
line=core_v$(number MAJOR).$(number MINOR)
patch=$folder/$line.patch
own="make one with 'scripts/make_patches.py CHECKOUT --out FOLDER' and set ADAPTRA_PATCHES=FOLDER"
if [ ! -f "$patch" ]; then
  there=""
  for path in "$folder"/core_v*.patch; do
    if [ -f "$path" ]; then path=${path##*/} there="$there ${path%.patch}"; fi
  done
  refuse "$given is of line $line, and there are patches for${there:- none} only; $own"
fi
read -r before after < <(sed -n 's/^index \([0-9a-f]\{40\}\)\.\.\([0-9a-f]\{40\}\).*/\1 \2/p' "$patch") ||
  refuse "$patch has no line 'index BLOB..BLOB'; $own"

case $(blob "$checkout/$script") in
  "$before") patched=no ;;
  "$after") patched=yes ;;
  *) refuse "$given/$script is not the one that $line.patch is for, blob $before; $own" ;;
esac
case $mode-$patched in
  check-yes) echo "patched" && exit ;;
  apply-yes) echo "already patched, nothing to do: $given/$script" && exit ;;
  revert-no) echo "not patched, nothing to do: $given/$script" && exit ;;
esac

# Where CHECKOUT is no work tree of its own, the blob id alone decides.
if [ -e "$checkout/.git" ]; then
  status() {
    git --no-optional-locks -C "$checkout" status --porcelain --untracked-files=no -- . ":(exclude)$script"
  }
  changes=$(status 2>/dev/null) || refuse "git cannot read $given: $(status 2>&1 | head -n 1)"
  [ -z "$changes" ] ||
    refuse "$given has changes of its own, the first is '${changes%%$'\n'*}'; commit or stash them"
fi
[ $mode != check ] || { echo "not patched, the patch fits" && exit; }
if [ ! -w "$checkout" ] || [ ! -w "$checkout/$script" ]; then
  refuse "$given/$script cannot be written: the file and its folder must be writable"
fi

# `git apply` removes the file before it writes it anew; so it works on a copy, which then takes the
# place of the file in one step: whenever this is killed, the file is the old or the new one.
scratch=$(mktemp -d "$checkout/.adaptra.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
cp -p "$checkout/$script" "$scratch/$script"
cp -p "$checkout/$script" "$scratch/same-mode-and-owner"
reverse="" want=$after crlf=false
if [ $mode = revert ]; then reverse=--reverse want=$before; fi
if grep -q $'\r$' "$scratch/$script"; then crlf=true; fi
printed=$(cd "$scratch" &&
  plain_git -c core.autocrlf=$crlf apply --unidiff-zero --whitespace=nowarn $reverse "$patch" 2>&1) ||
  die 1 "git apply $reverse $patch failed: ${printed%%$'\n'*}; $given/$script is as it was"
[ "$(blob "$scratch/$script")" = "$want" ] ||
  die 1 "$patch does not make blob $want, which its index line says; $given/$script is as it was"
cat "$scratch/$script" >"$scratch/same-mode-and-owner"
mv -f "$scratch/same-mode-and-owner" "$checkout/$script"
if [ $mode = revert ]; then echo "taken out: $given/$script"; else echo "patched: $given/$script ($line.patch)"; fi
