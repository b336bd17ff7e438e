#!/bin/sh
# Trains on several cards, one process each; the first time it sets everything up.
#
#     sh shell/train_dist.sh [flags of `python -m mobilenetv3_paddle.train`]
#     DEVICES=0,1,2,3 sh shell/train_dist.sh ...     these cards instead of the eight 0,1,2,3,4,5,6,7
#     FRAMEWORK=torch sh shell/train_dist.sh ...     the reference instead of the port
#
# On a machine without cards two processes share the CPU. Without --data-path it shows on lite_data that it runs.
# By default each process takes 32 images at a time and the learning rate is 0.1 for 256 images, in proportion
# (arXiv:1706.02677, section 2.1):
#
#     cards                  1        2       4      8
#     global batch size     32       64     128    256
#     learning rate     0.0125    0.025    0.05    0.1
#
# With another --batch-size give the --lr that follows from it: 0.8 for eight cards with 256 images each.
# Works from any folder: paths among the flags are relative to where it is called. What each process and
# the launcher write lies under OUTPUT_DIR/log. Exit status: 0 done, 2 the user must mend something, anything else as the
# launcher has it. VENV and PYTHON: see setup.sh.
set -eu

here=$(dirname -- "$0")
# shellcheck source=shell/train_common.sh
. "$here/train_common.sh"

if [ "$cards" -gt 0 ]; then
    device=gpu
    CUDA_VISIBLE_DEVICES=${DEVICES:-0,1,2,3,4,5,6,7}
    export CUDA_VISIBLE_DEVICES
    case ,$CUDA_VISIBLE_DEVICES, in
        *,,* | *[!0-9,]*) fail "DEVICES=$DEVICES is no list of card numbers such as 0,1,2,3: write it so" ;;
    esac
    processes=0 seen=,
    for card in $(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' ' '); do
        [ "$card" -lt "$cards" ] || fail "there is no card $card of $CUDA_VISIBLE_DEVICES:" \
            "nvidia-smi lists $cards; name those to use, such as DEVICES=0"
        case $seen in *,"$card",*) fail "DEVICES=$DEVICES names card $card twice: name it once" ;; esac
        processes=$((processes + 1)) seen=$seen$card,
    done
else
    device=cpu
    unset CUDA_VISIBLE_DEVICES # whose mention makes Paddle's launcher expect cards
    processes=2
    say "nvidia-smi lists no card: two processes on the CPU"
fi
lr=$(awk "BEGIN { print 0.0125 * $processes }")

output=output previous=''
for flag; do
    case $flag in --output-dir=*) output=${flag#*=} ;; esac
    [ "$previous" != --output-dir ] || output=$flag
    previous=$flag
done
log=$output/log/$(date +%Y%m%d-%H%M%S)-$$
mkdir -p "$log" 2>/dev/null || fail "output folder $output cannot be written: choose another with --output-dir"
say "$processes processes, learning rate $lr unless --lr says another, logs in $log"

set -- "$package.train" --device "$device" --lr "$lr" "$@"
case $package in
    mobilenetv3_paddle)
        # Paddle's launcher knows no -m, but starts any program.
        set -- paddle.distributed.launch --nproc_per_node "$processes" --log_dir "$log" --log_level ERROR \
            "$python" -m "$@"
        ;;
    mobilenetv3_ref)
        set -- torch.distributed.run --standalone --nproc_per_node "$processes" --log_dir "$log" --redirects 2 \
            -m "$@"
        ;;
esac
# The processes share the cores, and a launcher would say so with a warning.
if OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m "$@" 2>"$log/launcher.log"; then exit 0; else status=$?; fi
# The launchers report at length that a process failed; what it said itself is what the user must know.
if find "$log" -type f -exec grep -hF "python -m $package.train: error: " {} + | sort -u | grep . >&2; then exit 2; fi
say "error: a process ended with an error: see the files in $log"
exit "$status"
