#!/bin/sh
# Makes the project's virtual environment ready and prints the path of its interpreter:
#
#     sh shell/setup.sh
#
# The first run makes the environment and installs requirements.txt, sturdyio, portproof and this project into it; later
# runs start at once, until requirements.txt, a pyproject.toml, the interpreter or the place of the project changes.
# CUDA=cu130 chooses the builds for cards, of the CUDA version that the driver takes (cu126, cu129, ...), CUDA=cpu
# those without. Without CUDA a new environment gets PyTorch's CPU build where no NVIDIA card is seen and PyTorch's own
# index offers it, else what pip finds; later runs keep what is there, also what was installed by hand.
# VENV is where the environment lies (default: .venv in the project); PYTHON is the interpreter to make it from
# (default: the first of python3.12, python3.11, python3.10, python3, python that fits).
set -eu

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 2
}

# The version of interpreter $1, such as 3.11; nothing if it does not run: a version manager leaves such names.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# Prints the interpreter to make the environment from.
find_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3.12 python3.11 python3.10 python3 python; fi
    found='' incomplete=''
    for candidate; do
        version=$(version_of "$candidate")
        [ -n "$version" ] || continue
        found="$found${found:+, }$candidate ($version)"
        case $version in 3.10 | 3.11 | 3.12) ;; *) continue ;; esac
        # Debian's venv module is there without python3-venv, but only ensurepip can put pip into what it makes
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        incomplete="${incomplete:-$candidate ($version)}"
    done
    [ -z "$incomplete" ] || fail "$incomplete cannot make virtual environments:" \
        "on Debian or Ubuntu run 'apt install python3-venv', or name another interpreter with PYTHON=..."
    fail "Python 3.10, 3.11 or 3.12 is needed, tried $*, found ${found:-none}:" \
        "install one of them, or name it with PYTHON=..."
}

# One set-up at a time, also of machines that share the folder. A lock whose process is known to have gone, since it ran
# on this machine, was left by one that was killed.
lock() {
    mkdir -p "$(dirname -- "$venv")" 2>/dev/null || fail "cannot create $venv: name another place with VENV=..."
    machine=$(uname -n) tries=0
    until (set -C && echo "$$ $machine $(date '+%Y-%m-%d %H:%M:%S')" >"$venv.lock") 2>/dev/null; do
        tries=$((tries + 1))
        [ "$tries" -lt 20 ] || fail "cannot write beside $venv: name another place with VENV=..., or remove" \
            "$venv.lock.turn if it is there"
        held=$(cat "$venv.lock" 2>/dev/null) || continue # it has just been released
        [ -n "$held" ] || { sleep 1 && held=$(cat "$venv.lock" 2>/dev/null); } || continue # it was just being written
        owner=${held%% *} place=${held#* }
        if [ "${place%% *}" != "${held:+$machine}" ] || kill -0 "$owner" 2>/dev/null || [ -d "/proc/${owner:-0}" ]; then
            fail "process $owner of ${place%% *} has been setting up $venv since ${place#* }: wait until it ends and" \
                "run this again (if it is gone, remove $venv.lock)"
        fi
        # Of several that find it left, one at a time looks and removes: it may be the lock of who was first by now.
        (set -C && : >"$venv.lock.turn") 2>/dev/null || { sleep 1 && continue; }
        [ "$(cat "$venv.lock" 2>/dev/null)" != "$held" ] || rm -f "$venv.lock"
        rm -f "$venv.lock.turn"
    done
    trap 'rm -f "$venv.lock"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' HUP TERM
}

# Leaves an interpreter with pip at $python; touches no folder that is something else.
ensure_venv() {
    version=$(version_of "$python")
    case $version in
        3.10 | 3.11 | 3.12) ;;
        ?*) fail "$venv holds Python $version, not 3.10 to 3.12: delete it, or name another place with VENV=..." ;;
        '') make_venv ;;
    esac
    # an interrupted set-up may have left no pip
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --upgrade --default-pip >&2 ||
        fail "$venv has no pip: delete it and run this again"
}

make_venv() {
    [ -f "$venv/pyvenv.cfg" ] || [ -z "$(ls -A "$venv" 2>/dev/null)" ] ||
        fail "$venv is there and is no virtual environment: name another place with VENV=..."
    base=$(find_python)
    say "making $venv with $base ($(version_of "$base"))"
    "$base" -m venv --clear "$venv" >&2 ||
        fail "$base could not make $venv: mend what it says above, or name another place with VENV=..."
}

# What the environment is made for, in one line; installed again when it changes.
state() {
    {
        "$python" -V && echo "$root" && cat "$root/requirements.txt" "$root/sturdyio/pyproject.toml" \
            "$root/portproof/pyproject.toml" "$root/pyproject.toml"
    } 2>/dev/null | cksum
}
is_ready() {
    [ -f "$stamp" ] && case $(cat "$stamp") in "$(state)${CUDA:+ $CUDA}"*) ;; *) return 1 ;; esac
}

run_pip() { PIP_PROGRESS_BAR=off "$python" -m pip --disable-pip-version-check --no-input "$@" 2>&1 </dev/null; }

# Runs the pip commands of stdin, whose lines are their arguments.
run_pips() {
    while read -r arguments; do
        # shellcheck disable=SC2086  # they are words
        [ -z "$arguments" ] || run_pip $arguments || return
    done
}

sees_card() { nvidia-smi >/dev/null 2>&1 || [ -d /proc/driver/nvidia ] || [ -e /dev/nvidia0 ]; }

# Whether PyTorch's index has the CPU build of version $1 for this interpreter. It is asked once, for 10 s at most: as
# one index among others pip would ask it five times for each of the requirements.
offers_cpu_build() {
    offered=$(timeout 10 "$python" -m pip --no-input --retries 0 \
        index versions torch --index-url https://download.pytorch.org/whl/cpu 2>/dev/null </dev/null) || return
    case $offered in *"$1+cpu"*) ;; *) return 1 ;; esac
}

# Sets CUDA=cpu where no card is seen and nobody chose; says which builds are installed, why, and their size.
choose_builds() {
    size='3 GB to download, 7 GB on disk'
    torch=$(sed -n 's/^torch==//p' "$root/requirements.txt")
    if [ -n "${CUDA:-}" ]; then
        say "CUDA=$CUDA chooses the builds"
    elif [ -z "$torch" ]; then
        say "requirements.txt does not name torch" # in a port that is shipped alone
    elif "$python" -c 'from importlib.metadata import version; version("torch")' 2>/dev/null; then
        say "keeping the builds that are in $venv"
    elif sees_card; then
        say "an NVIDIA card is here: the builds that pip finds, which is PaddlePaddle for the CPU" \
            "(CUDA=cu130 or the like takes GPU builds of both frameworks, CUDA=cpu of neither)"
    elif offers_cpu_build "$torch"; then
        CUDA=cpu
        say "no NVIDIA card is seen: PyTorch's CPU build (CUDA=cu130 or the like takes GPU builds)"
    else
        say "no NVIDIA card is seen, but PyTorch's index did not offer torch $torch+cpu within 10 s:" \
            "the build that pip finds, which may bring CUDA's libraries"
    fi
    [ "${CUDA:-}" != cpu ] || size='1 GB to download, 3 GB on disk'
}

# The stamp is written last, so that an install that failed or was interrupted is done again.
install() {
    rm -f "$stamp"
    wanted=$(state)
    say "installing requirements.txt into $venv: at first $size, some minutes (see $log)"
    set -- -e "$root"
    for package in portproof sturdyio; do
        [ ! -d "$root/$package" ] || set -- -e "$root/$package" "$@" # a port that is shipped alone has no portproof
    done
    first=$("$python" "$root/shell/builds.py" "$root/requirements.txt" "$venv/requirements.txt" "${CUDA:-}")
    {
        # an older pip (Python 3.10.0 to 3.10.2) cannot install a pyproject.toml in place
        run_pip install 'pip>=21.3' && printf '%s\n' "$first" | run_pips &&
            run_pip install -r "$venv/requirements.txt" "$@" &&
            echo "$wanted${CUDA:+ $CUDA}" >"$stamp"
    } | tee "$log" | while IFS= read -r line; do
        case $line in
            *"ERROR: pip's dependency resolver"*) ;; # both frameworks pin the CUDA libraries, see builds.py
            *ERROR:* | *error:* | *Retrying* | *"MB)") say "  $line" ;;
            "Installing collected"*) say "  unpacking, which takes a minute" ;;
        esac
    done
    is_ready || fail "pip could not install requirements.txt into $venv:" \
        "mend what it says above (network? disk space? a build that CUDA=cu130 or the like must name?) and run this" \
        "again; what pip cached is not fetched twice"
}

case ${CUDA:-cpu} in
    cpu | cu1[0123456789][0123456789]) ;;
    *) fail "CUDA=$CUDA is no build: name the CUDA version that your driver takes, such as cu130, or cpu" ;;
esac
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=${VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
venv=${venv%/}
python=$venv/bin/python
stamp=$venv/setup.stamp
log=$venv/setup.log

if ! is_ready; then
    lock
    is_ready || { # it was being set up until now
        ensure_venv
        choose_builds
        install
    }
fi
printf '%s\n' "$python"
