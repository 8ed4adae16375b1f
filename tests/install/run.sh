#!/usr/bin/env bash
# Installs the build into a folder of its own, compiles every installed header alone, and builds and runs the examples against
# the package, as a user would.   run.sh BUILD SOURCE
set -euo pipefail
build=$1 source=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cmake --install "$build" --prefix "$dir/prefix" >/dev/null
for header in "$dir"/prefix/include/kvferry/*.h; do
  echo "#include <kvferry/$(basename "$header")>" >"$dir/one.cc"
  "${CXX:-g++}" -std=c++20 -Wall -Wextra -Werror -I"$dir/prefix/include" -fsyntax-only "$dir/one.cc"
done
cmake -S "$source/examples/two_processes" -B "$dir/example" -DCMAKE_PREFIX_PATH="$dir/prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$dir/example" >/dev/null
"$dir/example/two_processes"
PKG_CONFIG_PATH=$(dirname "$(find "$dir/prefix" -name kvferry.pc)") pkg-config --exists kvferry
# Nothing but the public API is visible.
lib=$(find "$dir/prefix" -name 'libkvferry.so' | head -1)
if nm -DC --defined-only "$lib" | grep -E ' (T|B|D) ' | grep -E 'kvferry::(proto|wire|plan|net|data)::' | grep -v LoopbackFabric | head -3 | grep .; then
  echo "internal symbols are visible"
  exit 1
fi
