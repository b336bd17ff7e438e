#!/bin/sh
# Trains on several cards, one process each; the first time it sets everything up.
#
#     sh shell/train_dist.sh [flags of `python -m mobilenetv3_paddle.train`]
#     DEVICES=0,1,2,3 sh shell/train_dist.sh ...     these cards instead of all that nvidia-smi lists
#     CUDA_VISIBLE_DEVICES=4,5 sh shell/train_dist.sh ...     as a scheduler sets it: these, or those of them in DEVICES
#     FRAMEWORK=torch sh shell/train_dist.sh ...     the reference instead of the port
#     MASTER=10.0.0.1:29500 NNODES=2 NODE_RANK=0 sh shell/train_dist.sh ...     on the first of two machines
#     MASTER=10.0.0.1:29500 NNODES=2 NODE_RANK=1 sh shell/train_dist.sh ...     on the second
#
# Several machines need the same project, flags, number of cards and data each; MASTER is an address of the first and a
# port that is free there, and the machines must reach each other at any port. The first writes the checkpoints, and all
# must find the one that --resume names.
#
# A card is its number, its UUID (GPU-...) or, alone, a MIG instance's (MIG-...), as nvidia-smi -L lists them. Where
# there is none, or CUDA_VISIBLE_DEVICES leaves none, two processes, or PROCESSES of them, share the CPU. Without
# --data-path it shows on lite_data that it runs.
# By default each process takes 32 images at a time and the learning rate is 0.1 for 256 images, in proportion
# (arXiv:1706.02677, section 2.1):
#
#     cards                  1        2       4      8
#     global batch size     32       64     128    256
#     learning rate     0.0125    0.025    0.05    0.1
#
# where cards are those of all machines together.
# With another --batch-size give the --lr that follows from it: 0.8 for eight cards with 256 images each.
# Works from any folder: paths among the flags are relative to where it is called. What each process and
# the launcher write lies under OUTPUT_DIR/log. SIGTERM lets training finish its step and write a checkpoint, for which
# the launchers give it 30 s; so does Ctrl-C, with 10 s. When a process dies the others are ended, too. Exit status: 0
# done, 2 the user must mend something, 143 stopped by SIGTERM (130: by Ctrl-C), anything else as the launcher has it.
# VENV and PYTHON: see setup.sh.
set -eu

here=$(dirname -- "$0")
# shellcheck source=shell/train_common.sh
. "$here/train_common.sh"

is_count() { case $1 in '' | 0* | *[!0123456789]*) return 1 ;; esac; }

if [ "$cards" -gt 0 ]; then
    device=gpu given=${CUDA_VISIBLE_DEVICES:-} named=DEVICES
    [ -z "$given" ] || [ -n "${DEVICES:-}" ] || named=CUDA_VISIBLE_DEVICES
    CUDA_VISIBLE_DEVICES=${DEVICES:-${given:-$(seq -s , 0 $((cards - 1)))}}
    export CUDA_VISIBLE_DEVICES
    said="$named=$CUDA_VISIBLE_DEVICES" processes=0 uuids=0 mig='' seen=,
    case ,$CUDA_VISIBLE_DEVICES, in
        *,,* | *[!0123456789abcdefGIMPU/,-]*) fail "$said is no list of cards such as 0,1,2,3: write it so" ;;
    esac
    for card in $(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' ' '); do
        case $card in
            GPU-* | MIG-*) # CUDA takes the beginning of a UUID, too
                uuids=$((uuids + 1))
                case $card in MIG-*) mig=$card ;; esac
                named_card=$(printf '%s\n' "$listed" | grep -o "(UUID: ${card}[^)]*" || :)
                [ "$(printf '%s\n' "$named_card" | grep -c UUID)" = 1 ] ||
                    fail "$said: no card, or several, begin with $card: take UUIDs that nvidia-smi -L lists"
                ;;
            *[!0123456789]*) fail "$said is no list of cards such as 0,1,2,3: write it so" ;;
            *)
                named_card=$card
                while [ "${named_card#0?}" != "$named_card" ]; do named_card=${named_card#0}; done
                [ "$card" -lt "$cards" ] || fail "there is no card $card of $CUDA_VISIBLE_DEVICES:" \
                    "nvidia-smi lists $cards; name those to use, such as $named=0"
                ;;
        esac
        case $seen in *,"$named_card",*) fail "$said names card $card twice: name it once" ;; esac
        case ,$given, in
            ,, | *,"$card",*) ;;
            *) fail "$said: card $card is not among CUDA_VISIBLE_DEVICES=$given: name some of those" ;;
        esac
        processes=$((processes + 1)) seen=$seen$named_card,
    done
    [ "$uuids" = 0 ] || [ "$uuids" = "$processes" ] ||
        fail "$said mixes numbers and UUIDs, of which CUDA takes one kind: write numbers alone, or UUIDs"
    [ -z "$mig" ] || [ "$processes" = 1 ] || fail "$said: CUDA shows a process one MIG instance: name one alone"
    used="cards $CUDA_VISIBLE_DEVICES ($named)"
    [ -n "${DEVICES:-}$given" ] || used="cards $CUDA_VISIBLE_DEVICES (all that nvidia-smi lists; DEVICES chooses some)"
else
    device=cpu
    processes=${PROCESSES:-2}
    is_count "$processes" || fail "PROCESSES=$processes is no number of processes: choose 1 or more"
    # No process sees a card that a scheduler keeps from this job; Paddle's launcher wants a name for each.
    CUDA_VISIBLE_DEVICES=-1 named=1
    while [ "$named" -lt "$processes" ]; do
        CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES,-1 named=$((named + 1))
    done
    export CUDA_VISIBLE_DEVICES
    used='the CPU'
    say "$no_card: $processes process(es) on the CPU"
fi

nodes=1
if [ -n "${MASTER:-}${NNODES:-}${NODE_RANK:-}" ]; then
    case ,${MASTER:-},${NNODES:-},${NODE_RANK:-}, in
        *,,*) fail "MASTER=${MASTER:-} NNODES=${NNODES:-} NODE_RANK=${NODE_RANK:-}: give all three, or none" ;;
    esac
    is_count "$NNODES" || fail "NNODES=$NNODES is no number of machines: choose 1 or more"
    nodes=$NNODES
    { [ "$NODE_RANK" = 0 ] || is_count "$NODE_RANK"; } && [ "$NODE_RANK" -lt "$nodes" ] ||
        fail "NODE_RANK=$NODE_RANK is no place among $nodes machines: choose 0 to $((nodes - 1))"
    host=${MASTER%:*} port=${MASTER##*:}
    case $host in '' | *:*) port='' ;; esac
    is_count "$port" && [ "$port" -lt 65536 ] ||
        fail "MASTER=$MASTER is no HOST:PORT: give an address of the first machine and a free port, 10.0.0.1:29500 say"
    place=$("$python" -m mobilenetv3_common.network "$host" "$port" 2>/dev/null) ||
        fail "MASTER=$MASTER: no way to $host from here; give an address of the first machine that all can reach"
    # shellcheck disable=SC2086  # three words
    set -- $place "$@"
    host=$1 own=$2
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$3}" # else gloo listens where the machine's own name points
    shift 3
    [ "$NODE_RANK" -gt 0 ] || [ "$host" = "$own" ] ||
        fail "MASTER=$MASTER is not this machine, which is $own there: NODE_RANK=0 belongs to the machine in MASTER"
fi
total=$((processes * nodes))
lr=$(awk "BEGIN { print 0.0125 * $total }")

output=output previous=''
for flag; do
    case $flag in --output-dir=*) output=${flag#*=} ;; esac
    [ "$previous" != --output-dir ] || output=$flag
    previous=$flag
done
log=$output/log/$(date +%Y%m%d-%H%M%S)-$(uname -n)-$$ # which no other machine of a shared folder has
mkdir -p "$log" 2>/dev/null || fail "output folder $output cannot be written: choose another with --output-dir"
say "$total processes, learning rate $lr unless --lr says another, on $used, logs in $log"
[ "${RECIPE_PROCESSES:-$total}" = "$total" ] ||
    say "the recipe's learning rate is that of $RECIPE_PROCESSES processes: with $total take the" \
        "--gradient-accumulation-steps that makes as many, or another --lr"

set -- "$package.train" --device "$device" --lr "$lr" "$@"
case $package in
    mobilenetv3_paddle)
        # Paddle's launcher knows no -m, but starts any program.
        set -- --nproc_per_node "$processes" --log_dir "$log" --log_level ERROR "$python" -m "$@"
        [ "$nodes" = 1 ] || set -- --master "$host:$port" --host "$own" --nnodes "$nodes" --rank "$NODE_RANK" "$@"
        set -- paddle.distributed.launch "$@"
        ;;
    mobilenetv3_ref)
        set -- --nproc_per_node "$processes" --log_dir "$log" --redirects 2 --signals_to_handle SIGTERM -m "$@"
        if [ "$nodes" = 1 ]; then
            set -- --standalone "$@"
        else
            set -- --nnodes "$nodes" --node_rank "$NODE_RANK" --master_addr "$host" --master_port "$port" "$@"
        fi
        set -- torch.distributed.run "$@"
        ;;
esac

# The launcher runs in the background, because a shell that waits for a command handles no signal until it ends.
launcher='' stopped=0
stop() {
    stopped=$1
    [ -z "$launcher" ] || kill -TERM "$launcher" 2>/dev/null || true
}
trap 'stop 143' TERM
trap 'stop 130' INT
trap 'stop 129' HUP
# The processes share the cores, and a launcher would say so with a warning.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m "$@" 2>"$log/launcher.log" &
launcher=$!
[ "$stopped" = 0 ] || stop "$stopped"
while :; do # a signal ends `wait`, but not the launcher
    status=0
    wait "$launcher" || status=$?
    kill -0 "$launcher" 2>/dev/null || break
done
[ "$status" != 0 ] || exit 0

# The launchers report at length that a process failed; what it said itself is what the user must know.
logs() { find "$log" \( -name 'workerlog.*' -o -name stderr.log \) -exec "$@" {} +; }
words="python -m $package.train: "
if logs grep -hF "${words}error: " | sort -u | grep . >&2; then exit 2; fi

# Which process ended first the launcher says, unless others, which lost their connection to it, ended before it looked.
case $package in
    mobilenetv3_paddle)
        first=$(awk '/^Container rank .* log / { sub(/.* log /, ""); sub(/ *$/, ""); print; exit }' "$log/launcher.log")
        ;;
    mobilenetv3_ref)
        rank=$(awk '/^Root Cause/ { seen = 1 }
            seen && /local_rank:/ { sub(/.*local_rank: /, ""); sub(/\).*/, ""); print; exit }' "$log/launcher.log")
        first=$(find "$log" -path "*/$rank/stderr.log")
        ;;
esac
if [ ! -f "$first" ] || grep -q 'gloo/transport' "$first"; then
    silent=$(logs grep -L 'gloo/transport' | awk 'NR == 1')
    first=${silent:-${first:-$log/launcher.log}}
fi

# A cluster may send SIGTERM to the processes themselves, too.
if [ "$stopped" != 0 ] || grep -qF "${words}stopped" "$first"; then
    logs grep -hF "${words}stopped" | sort -u | grep . >&2 || say "stopped before there was anything to save"
    exit $((stopped ? stopped : 143))
fi
say "error: a process was killed or failed, and the others were ended: see $first"
exit "$status"
