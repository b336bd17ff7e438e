# Sourced by train.sh and train_dist.sh: what both must know, and the flags of a run that names no data.
# shellcheck shell=sh disable=SC2034,SC2154  # `here` is theirs, and so is what is set here

say() { printf 'train: %s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 2
}

# Parsing and computing must not depend on the user's locale, which may write 0.1 as 0,1; what is started keeps it.
awk() { LC_ALL=C command awk "$@"; }
find() { LC_ALL=C command find "$@"; }
grep() { LC_ALL=C command grep "$@"; }
sort() { LC_ALL=C command sort "$@"; }

case ${FRAMEWORK:-paddle} in
    paddle) package=mobilenetv3_paddle ;;
    torch) package=mobilenetv3_ref ;;
    *) fail "FRAMEWORK=$FRAMEWORK is neither paddle nor torch: name one of them, or leave it out for paddle" ;;
esac
listed=$(nvidia-smi -L 2>/dev/null || true)
cards=$(printf '%s\n' "$listed" | grep -c '^GPU ' || true)
no_card='nvidia-smi lists no card'
case $cards,${CUDA_VISIBLE_DEVICES-unset} in
    0,*) ;;
    "$cards," | "$cards",-1* | "$cards",NoDevFiles) # as CUDA reads it, and as Slurm writes it for a job without cards
        cards=0 no_card="CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' leaves no card"
        ;;
esac
python=$(sh "$here/setup.sh")

case " $* " in
    *" --help "* | *" -h "*) exec "$python" -m "$package.train" --help ;;
    *" --data-path "* | *" --data-path="*) ;;
    *)
        say "no --data-path: a demonstration, 4 epochs on the 16 images of lite_data, which takes less than a minute"
        set -- --data-path "$here/../lite_data" --epochs 4 --batch-size 8 --print-freq 1 "$@"
        ;;
esac
