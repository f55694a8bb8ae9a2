#!/bin/sh
# Runs tests of the compiled kernel on an emulated ARM processor: Python and torch for ARM, in qemu's user mode.
#
# Usage: tests/kernels/arm.sh FOLDER [pytest's arguments]; FOLDER keeps what is downloaded, about 700 MB.
# As root, on Debian or Ubuntu, once before:
#   dpkg --add-architecture arm64; apt update; apt install qemu-user-static g++-aarch64-linux-gnu
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
system=$folder/system site=$folder/site library=$folder/native.so

if [ ! -e "$folder/ready" ]; then
  rm -rf "$folder/debs" "$system" "$site"
  mkdir -p "$folder/debs" "$system"
  packages=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances python3:arm64 libgomp1:arm64 libstdc++6:arm64 | grep '^[a-z].*:arm64$' | sort -u)
  (cd "$folder/debs" && apt-get download -qq $packages)
  for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$system"; done
  version=$(basename "$(readlink -f "$system/usr/bin/python3")" | sed 's/python//')
  install="python3 -m pip install --quiet --no-deps --target $site --only-binary=:all: --python-version $version
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64"
  # PyPI's wheels for ARM need CUDA's libraries from torch 2.11 on; torch's own index has wheels without.
  $install --index-url https://download.pytorch.org/whl/cpu torch || $install 'torch<2.11'
  $install numpy sympy mpmath jinja2 markupsafe networkx filelock fsspec typing_extensions \
    pytest pytest-xdist execnet iniconfig pluggy packaging pygments
  touch "$folder/ready"
fi

CXX=aarch64-linux-gnu-g++ python3 src/whereformer/kernels/native/build.py "$library"
# Torch before 2.11 does not say that the processor has instructions for bfloat16, so the level is named.
for level in ${LEVELS:-base neonbf16}; do
  echo "== $level"
  WHEREFORMER_NATIVE_LIBRARY=$library WHEREFORMER_TEST_LEVEL=$level qemu-aarch64-static -cpu max -L "$system" \
    -E PYTHONPATH="$PWD/src:$PWD:$site" "$system/usr/bin/python3" -m pytest -p no:cacheprovider -n 0 "$@"
done
