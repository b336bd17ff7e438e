"""Judge any PaddlePaddle port against its PyTorch reference, and say at which module it departs.

  portproof align --ref torchvision.models:resnet18 --port paddle.vision.models:resnet18 --input 4,3,224,224

Both are built by calling what is named, get the same weights, made from --seed so that no fault hides, and are run
forward and backward, in eval and train mode, in float64 and float32. Where names differ the map between them is
proposed and checked with values. What is saved and nothing changes, such as tables and masks, is compared as built
too: if there are any, each side is made twice more, to see what the seed changes. Exit status: 0 aligned, 1 not, 2
could not tell.

With --locate-only the whole is not judged. Each module is run alone on both sides, on what the reference's received:
forward, then backward, in eval and in train mode, in float64 and, if nothing departs there, in float32. Exit status:
0 no module departs, 1 one does, 2 could not tell.

With --loss some steps of training are compared too, in float64: loss, gradients, parameters and statistics after each.

  portproof align --ref my.net:Net --port my_port.net:Net --input 8,16 --labels 8:int64:10 --steps 3 \\
      --loss torch.nn.functional:cross_entropy paddle.nn.functional:cross_entropy \\
      --optimizer 'torch.optim:AdamW(lr=0.001)' 'paddle.optimizer:AdamW(learning_rate=0.001)'

In Python, where steps may be of any form, that is:

  pair = portproof.ladder.same_weights(ref, port, [x])
  portproof.ladder.backward(*pair, *portproof.ladder.plain_steps((ref_loss, port_loss)), [(x, labels)] * 3)
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from portproof import align
from portproof.backends import backend
from portproof.backends.base import SUFFIXES
from portproof.backends.trace import Inputs, as_call
from portproof.commands.arguments import INPUT, JUDGED, PAIR, add_flags, judging_options, load_models, read_map
from portproof.commands.outcome import Outcome, add_outcome_flags
from portproof.compare import DONE, FAIL, Verdict, exit_status
from portproof.io.process import add_threads_flag, shown
from portproof.io.records import save_text
from portproof.ladder.pairs.named import model_factory, named_function
from portproof.mapping.name_map import NameMap, map_text
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, staying

PROG = "portproof align"
NOT_LOCATED = "not located: each module alone gives what the reference's gives"
MODEL = "the model itself"
OF_THE_WHOLE = ("save_map", "save_weights", "print_map", "loss", "accept", "json", "report", "quiet", "verbose")


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    file: dict[str, Any] = {"metavar": "FILE"}
    pair: dict[str, Any] = {"nargs": 2, "metavar": ("REF", "PORT")}
    labels: dict[str, Any] = {"action": "append", "metavar": "SHAPE[:DTYPE[:HIGH]]"}
    add_flags(parser, *PAIR, "--seed", "--inputs")
    add("--weights", help="the reference's weights, for both sides, instead of probe weights", **file)
    add("--port-weights", help="the port's own .pdparams or .safetensors, compared with --weights too", **file)
    add_flags(parser, "--device")
    add_threads_flag(parser)
    add_flags(parser, *JUDGED)
    add("--locate-only", action="store_true", help="run each module alone without judging the whole")
    add("--print-map", action="store_true", help="print which module of the port stands for which of the reference")
    add("--save-map", help="write that as YAML, as --map reads it", **file)
    mapped = "mapped from the reference's --weights"
    add("--save-weights", help=f"write the port's weights, {mapped}, as .pdparams or .safetensors", **file)
    add("--loss", help="PKG.MOD:FUNCTION of (output, labels) of each side: compare steps of training too", **pair)
    add("--labels", help="shape of what --loss takes after the output, such as 8:int64:10; may be repeated", **labels)
    factory = "PKG.MOD:FACTORY(KEYWORD=VALUE, ...)"
    add("--optimizer", help=f"{factory} of each side's, which gets the parameters; else SGD, rate 0.01", **pair)
    add("--steps", type=positive_int, default=3, help="how many steps of training are compared with --loss")
    add_outcome_flags(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    if args.locate_only:
        if args.mode != "both":
            raise UserError("--locate-only looks in both modes: leave --mode out")
        for name in OF_THE_WHOLE:
            if getattr(args, name):
                raise UserError(f"--locate-only does not judge the whole: leave --{name.replace('_', '-')} out")
    if args.port_weights and not args.weights:
        raise UserError("--port-weights are compared with --weights: give both")
    if args.save_weights:
        if not args.weights or args.port_weights:
            raise UserError("--save-weights writes the --weights of the reference for the port: give these alone")
        suffixes = (*SUFFIXES["paddle"], ".safetensors")
        if Path(args.save_weights).suffix not in suffixes:
            raise UserError(f"--save-weights {args.save_weights} does not end in {' or '.join(suffixes)}: choose one")
    if (args.labels or args.optimizer) and not args.loss:
        raise UserError("--labels and --optimizer are for steps of training: give --loss")


def main(args: argparse.Namespace) -> int:
    check(args)
    outcome = Outcome(args, PROG, args.port)
    names = read_map(args.map)
    ref, port, inputs = load_models(args, judged=True)
    factories = model_factory(args.ref, "--ref"), model_factory(args.port, "--port", of_port=True)
    weights = "probe"
    if args.weights:
        weights = "reference"
        backend("torch").load_weights(ref, args.weights, "weights")
    if args.port_weights:
        weights = "own"
        backend("paddle").load_weights(port, args.port_weights, "port weights")
    train = _training(args, inputs) if args.loss else None
    outcome.say(f"{args.port} against {args.ref}, {args.device}, seed {args.seed}, {weights} weights")
    options = {**judging_options(args), "names": names, "weights": weights, "seed": args.seed, "device": args.device}
    options |= {"drawn": not args.inputs, "factories": factories}
    if args.locate_only:
        from portproof.ladder.pairs.pair import Options
        from portproof.ladder.pairs.whole import search

        del options["accept"]  # it is of the whole
        with shown(PROG), staying():
            location, notes = search(ref, port, inputs, Options(**options))
        print(*notes, *(location.lines() if location else [NOT_LOCATED]), sep="\n")
        return FAIL if location else exit_status(DONE)
    with shown(PROG), staying():
        verdict = align(ref, port, inputs, **options)
    found = verdict.names
    assert found is not None
    outcome.add(verdict, verdict.report(args.verbose))
    if args.print_map:
        print(*map_lines(found), sep="\n")
    if args.save_map:
        save_map(found, args.save_map, verdict.doubt)
    if train and not found.ambiguous and not found.problems:
        with shown(PROG), staying():
            trained = train(ref, port, names, weights)
        outcome.add(trained)
    status = outcome.end()
    if args.save_weights:
        try:
            save_weights(ref, port, found, args, verdict.doubt)
        except UserError as error:  # a failed verdict already says what the port lacks
            if status != FAIL:
                raise
            print(f"{PROG}: weights not written: {error}", file=sys.stderr)
    return status


def map_lines(names: NameMap) -> list[str]:
    calls = {label: port for label, port in names.calls.items() if label.partition("#")[0] not in names.modules}
    lines = []
    for title, pairs in (("modules with weights", names.modules), ("calls of other modules", calls)):
        lines.append(f"map of {title}:")
        for name, port in pairs.items():
            rests_on = f", {names.unsure[name]}" if name in names.unsure else ""
            lines.append(f"  {name or MODEL}: {port or MODEL}{rests_on}")
    return lines


def save_map(names: NameMap, path: str, doubt: Sequence[str]) -> None:
    if names.ambiguous:
        raise UserError(f"no map is written to {path}, since none was chosen: say in --map which is which")
    save_text(map_text(names), Path(path))
    print(f"wrote {path}: {len(names.lines)} lines", *doubt[:1], sep="; ")


def save_weights(ref: Any, port: Any, names: NameMap, args: argparse.Namespace, doubt: Sequence[str]) -> None:
    from portproof.mapping.conversion import convert_state_dict

    if names.ambiguous or names.problems:
        reason = names.ambiguous or ": ".join(next(iter(names.problems.items())))
        raise UserError(f"{args.save_weights} is not written, since the map is not whole ({reason}): give a --map")
    weights = backend("torch").state_arrays(ref)
    arrays = convert_state_dict(weights, ref, port, names.keys, f"weights {args.weights}")
    backend("paddle").write_weights(arrays, args.save_weights)
    print(f"wrote {args.save_weights}: {len(arrays)} tensors", *doubt[:1], sep="; ")


def _training(args: argparse.Namespace, inputs: Inputs) -> Callable[..., Verdict]:
    from portproof import ladder

    call = as_call(inputs)
    if call.kwargs:
        raise UserError("--loss calls the models on positional arguments: leave NAME= out of --input")
    inputs = list(call.args)
    criteria = [named_function(text, "--loss") for text in args.loss]
    optimizers = None
    if args.optimizer:
        ref_make, port_make = (cast(Callable[..., Any], model_factory(text, "--optimizer")) for text in args.optimizer)
        optimizers = ref_make, lambda parameters: port_make(parameters=parameters)
    given = inputs if args.inputs else []
    drawn = [*([] if args.inputs else args.input or [INPUT]), *(args.labels or [])]
    batches = [(*given, *ladder.draw_inputs(drawn, args.seed + i)) for i in range(args.steps)]
    train = args.mode != "eval"
    makes = ladder.plain_steps(criteria, optimizers, inputs=len(inputs), train=train)

    def compared(ref: Any, port: Any, names: dict[str, str], weights: str) -> Verdict:
        pair = ladder.same_weights(ref, port, inputs, names=names, weights=weights, seed=args.seed)
        options = {"train": train, "dtypes": ("float64",), "names": names or None, "device": args.device}
        return ladder.backward(*pair, *makes, batches, **options)

    return compared
