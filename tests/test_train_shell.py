"""shell/train.sh and shell/train_dist.sh: what they start, with a stand-in for Python, and what really comes of it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import paddle
import pytest

from mobilenetv3_common.arguments import get_args_parser

ROOT = Path(__file__).parents[1]
TOOLS = ("awk", "date", "dirname", "find", "grep", "mkdir", "sh", "sort", "tr", "uname")
PACKAGES = {"paddle": "mobilenetv3_paddle", "torch": "mobilenetv3_ref"}

# Notes what it was called with and how; ends as it is told to, and may leave a log as two processes would.
STAND_IN = """#!/bin/sh
if [ "$2" = mobilenetv3_common.network ]; then
    echo "10.0.0.1 ${OWN:-10.0.0.1} eth7"
    exit "${NO_WAY:-0}"
fi
{
    echo "cwd $PWD"
    echo "CUDA_VISIBLE_DEVICES ${CUDA_VISIBLE_DEVICES-none}"
    echo "OMP_NUM_THREADS ${OMP_NUM_THREADS-none}"
    echo "GLOO_SOCKET_IFNAME ${GLOO_SOCKET_IFNAME-none}"
    for argument; do echo "argument $argument"; done
} >"$CALL"
previous=''
for argument; do
    if [ "$previous" = --log_dir ] && [ -n "${MESSAGE:-}" ]; then
        mkdir -p "$argument/1"
        printf 'Traceback\\n%s\\n' "$MESSAGE" >"$argument/workerlog.0"
        printf '%s\\n' "$MESSAGE" >"$argument/1/stderr.log"
    fi
    previous=$argument
done
echo "noise of a launcher" >&2
exit "${STATUS:-0}"
"""


class Project:
    """A copy of the scripts beside lite_data, with a set-up that has been done and a PATH of the bare necessities."""

    def __init__(self, folder: Path, python: Path, locale: dict[str, str]) -> None:
        self.folder, self.locale = folder, locale
        self.root = folder / "a project"
        (self.root / "shell").mkdir(parents=True)
        for script in (ROOT / "shell").glob("*.sh"):
            shutil.copy(script, self.root / "shell")
        (self.root / "shell" / "setup.sh").write_text(f"echo '{python}'\n")
        (self.root / "lite_data").symlink_to(ROOT / "lite_data")
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.cwd = folder / "somewhere else"
        self.cwd.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.folder), **self.locale}

    def add_cards(self, count: int) -> None:
        lines = "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i}abc)'\n" for i in range(count))
        lines += "echo '  MIG 1g.18gb     Device  0: (UUID: MIG-5-6)'\n" * (count > 0)
        self.write_program(self.bin / "nvidia-smi", f'#!/bin/sh\n[ "$1" = -L ] || exit 1\n{lines or "exit 9"}')

    def write_program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def sh(self, script: str, *flags: str | Path, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["sh", str(self.root / "shell" / script), *map(str, flags)],
            cwd=self.cwd,
            env=self.environment | {"CALL": str(self.folder / "call"), **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def call(self) -> tuple[dict[str, str], list[str]]:
        """(what the stand-in saw, its arguments) at its last call, which is forgotten."""
        lines = [line.split(" ", 1) for line in (self.folder / "call").read_text().splitlines()]
        (self.folder / "call").unlink()
        return {k: v for k, v in lines if k != "argument"}, [v for k, v in lines if k == "argument"]


@pytest.fixture
def project(tmp_path, comma_locale) -> Project:
    """With a stand-in for Python and without cards, for a user with a decimal comma."""
    project = Project(tmp_path, tmp_path / "python", comma_locale)
    project.write_program(tmp_path / "python", STAND_IN)
    return project


@pytest.fixture(params=PACKAGES)
def framework(request) -> str:
    """What FRAMEWORK may be."""
    return request.param


def flags_of(arguments: list[str], package: str):
    """The flags that the training command gets, as it would read them."""
    start = arguments.index(f"{package}.train")
    assert arguments[start - 1] == "-m"
    return get_args_parser("train", "either").parse_args(arguments[start + 1 :])


@pytest.mark.parametrize(
    "cards, scheduler, device",
    [
        *((None, None, "cpu"), (0, None, "cpu"), (1, None, "gpu"), (8, None, "gpu"), (8, "7", "gpu")),
        *((8, "", "cpu"), (8, "-1", "cpu"), (8, "NoDevFiles", "cpu")),
    ],
)
def test_train_starts_one_process_on_a_card_if_there_is_one(project, framework, cards, scheduler, device):
    if cards is not None:
        project.add_cards(cards)
    env = {} if scheduler is None else {"CUDA_VISIBLE_DEVICES": scheduler}
    result = project.sh("train.sh", FRAMEWORK=framework, **env)
    seen, arguments = project.call()
    args = flags_of(arguments, PACKAGES[framework])
    assert arguments[0] == "-m"
    assert (args.device, args.batch_size * args.epochs, Path(args.data_path).resolve()) == (
        device,
        32,
        ROOT / "lite_data",
    )
    assert args.lr == pytest.approx(0.1 * 32 / 256)
    assert (seen["cwd"], seen["CUDA_VISIBLE_DEVICES"]) == (str(project.cwd), "none" if scheduler is None else scheduler)
    assert ("no card: on the CPU" in result.stderr) == (device == "cpu")
    assert ("CUDA_VISIBLE_DEVICES='" in result.stderr) == (device == "cpu" and scheduler is not None)
    assert "a demonstration, 4 epochs" in result.stderr


@pytest.mark.parametrize("script", ["train.sh", "train_dist.sh"])
@pytest.mark.parametrize("data", [["--data-path", "my images"], ["--data-path=my images"]])
def test_the_callers_flags_are_passed_on_and_win(project, script, data):
    result = project.sh(script, *data, "--lr", "0.5", "--device", "cpu", "--epochs", "7")
    args = flags_of(project.call()[1], "mobilenetv3_paddle")
    assert (args.data_path, args.lr, args.device, args.epochs, args.batch_size) == ("my images", 0.5, "cpu", 7, 32)
    assert "demonstration" not in result.stderr


@pytest.mark.parametrize(
    "cards, devices, scheduler, visible, lr",
    [
        (8, None, None, "0,1,2,3,4,5,6,7", 0.1),
        (8, "0,1,2,3", None, "0,1,2,3", 0.05),
        (8, "6,4", None, "6,4", 0.025),
        (8, None, "5,6", "5,6", 0.025),
        (8, "6", "5,6", "6", 0.0125),
        (8, None, "GPU-7abc,GPU-2", "GPU-7abc,GPU-2", 0.025),
        (8, "GPU-7abc", None, "GPU-7abc", 0.0125),
        (8, None, "MIG-5-6", "MIG-5-6", 0.0125),
        (8, None, "", "-1,-1", 0.025),
        (8, "0,1,2", "-1", "-1,-1", 0.025),
        (8, None, "NoDevFiles", "-1,-1", 0.025),
        (1, "0", None, "0", 0.0125),
        (None, None, "5", "-1,-1", 0.025),
        (None, "0,1,2", None, "-1,-1", 0.025),
        (0, None, None, "-1,-1", 0.025),
    ],
)
def test_train_dist_starts_a_process_for_each_card(project, framework, cards, devices, scheduler, visible, lr):
    """The learning rate follows from 32 images a process: 0.1 for 256."""
    if cards is not None:
        project.add_cards(cards)
    env = {"FRAMEWORK": framework, "DEVICES": devices, "CUDA_VISIBLE_DEVICES": scheduler}
    env = {name: value for name, value in env.items() if value is not None}
    result = project.sh("train_dist.sh", "--data-path", "images", "--output-dir", "my output", **env)
    assert result.returncode == 0, result.stderr
    seen, arguments = project.call()
    args = flags_of(arguments, PACKAGES[framework])
    processes = len(visible.split(","))
    launcher = {"paddle": "paddle.distributed.launch", "torch": "torch.distributed.run"}[framework]
    assert arguments[:2] == ["-m", launcher]
    assert arguments[arguments.index("--nproc_per_node") + 1] == str(processes)
    assert not {"--gpus", "--devices"} & set(arguments)
    assert (args.device, args.batch_size) == ("cpu" if visible == "-1,-1" else "gpu", 32)
    assert args.lr == pytest.approx(lr) == pytest.approx(0.1 * 32 * processes / 256)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["OMP_NUM_THREADS"]) == (visible, "1")
    assert f"{processes} processes, learning rate {lr:g} unless" in result.stderr
    assert ("2 process(es) on the CPU" in result.stderr) == (visible == "-1,-1")


@pytest.mark.parametrize("comma", [False, True])
def test_the_learning_rate_has_a_point_in_any_locale(project, comma):
    if comma and not project.locale:
        message = "no locale with a decimal comma can be made: on Debian or Ubuntu run 'apt install locales'"
        pytest.fail(message) if os.environ.get("LOCALES_REQUIRED") else pytest.skip(message)
    if not comma:
        project.locale = {}
    assert project.sh("train_dist.sh", "--data-path", "images", PROCESSES="3").returncode == 0
    arguments = project.call()[1]
    assert arguments[arguments.index("--lr") + 1] == "0.0375"


def test_machines_find_each_other(project, framework):
    env = {"MASTER": "first:29500", "NNODES": "3", "NODE_RANK": "2", "OWN": "10.0.0.3", "FRAMEWORK": framework}
    project.add_cards(4)
    result = project.sh("train_dist.sh", "--data-path", "images", DEVICES="0,1,2,3", **env)
    assert result.returncode == 0, result.stderr
    seen, arguments = project.call()
    wanted = {
        "paddle": "--master 10.0.0.1:29500 --host 10.0.0.3 --nnodes 3 --rank 2 --nproc_per_node 4",
        "torch": "--nnodes 3 --node_rank 2 --master_addr 10.0.0.1 --master_port 29500 --nproc_per_node 4",
    }
    assert " ".join(arguments[2:12]) == wanted[framework]
    assert flags_of(arguments, PACKAGES[framework]).lr == pytest.approx(0.1 * 32 * 12 / 256)
    assert seen["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("flags", [["--output-dir", "my output"], ["--output-dir=my output"], []])
def test_logs_lie_in_the_output_folder(project, framework, flags):
    result = project.sh("train_dist.sh", *flags, FRAMEWORK=framework, OMP_NUM_THREADS="3")
    seen, arguments = project.call()
    log = arguments[arguments.index("--log_dir") + 1]
    assert re.fullmatch(rf"{'my output' if flags else 'output'}/log/\d{{8}}-\d{{6}}-{os.uname().nodename}-\d+", log)
    assert f"logs in {log}\n" in result.stderr
    assert (project.cwd / log / "launcher.log").read_text() == "noise of a launcher\n"
    assert [path.name for path in project.cwd.iterdir()] == [log.split("/")[0]]
    assert seen["OMP_NUM_THREADS"] == "3"


def machines(**env: str) -> dict[str, str]:
    return {"MASTER": "first:29500", "NNODES": "2", "NODE_RANK": "0", **env}


def last_line(result: subprocess.CompletedProcess) -> str:
    return result.stderr.splitlines()[-1]


def test_a_failing_process_has_the_last_word(project, framework):
    message = f"python -m {PACKAGES[framework]}.train: error: image x is broken: replace it"
    result = project.sh("train_dist.sh", FRAMEWORK=framework, MESSAGE=message, STATUS="1")
    assert (result.returncode, last_line(result)) == (2, message)
    assert result.stderr.count("error") == 1
    assert "noise" not in result.stderr
    result = project.sh("train_dist.sh", FRAMEWORK=framework, MESSAGE="Killed", STATUS="7")
    assert (result.returncode, "train: error: a process was killed" in last_line(result)) == (7, True)
    assert (project.cwd / last_line(result).rpartition(" ")[2]).read_text().endswith("Killed\n")
    result = project.sh("train.sh", FRAMEWORK=framework, STATUS="7")
    assert result.returncode == 7


@pytest.mark.parametrize(
    "script, cards, env, words",
    [
        ("train.sh", 0, {"FRAMEWORK": "jax"}, "FRAMEWORK=jax is neither paddle nor torch"),
        ("train_dist.sh", 0, {"FRAMEWORK": "Torch"}, "FRAMEWORK=Torch is neither paddle nor torch"),
        ("train_dist.sh", 4, {}, "no card 4 of 0,1,2,3,4,5,6,7: nvidia-smi lists 4; name those to use"),
        ("train_dist.sh", 8, {"DEVICES": "0,8"}, "no card 8 of 0,8: nvidia-smi lists 8"),
        ("train_dist.sh", 8, {"DEVICES": "0,one"}, "DEVICES=0,one is no list"),
        ("train_dist.sh", 8, {"DEVICES": "-1"}, "DEVICES=-1 is no list"),
        ("train_dist.sh", 8, {"DEVICES": ","}, "DEVICES=, is no list"),
        ("train_dist.sh", 8, {"DEVICES": "1,1"}, "DEVICES=1,1 names card 1 twice"),
        ("train_dist.sh", 8, {"DEVICES": "0,00"}, "DEVICES=0,00 names card 00 twice"),
        ("train_dist.sh", 8, {"DEVICES": "GPU-1,GPU-1a"}, "DEVICES=GPU-1,GPU-1a names card GPU-1a twice"),
        (
            "train_dist.sh",
            8,
            {"DEVICES": "0,5", "CUDA_VISIBLE_DEVICES": "5"},
            "card 0 is not among CUDA_VISIBLE_DEVICES",
        ),
        (
            "train_dist.sh",
            2,
            {"CUDA_VISIBLE_DEVICES": "4,5"},
            "no card 4 of 4,5: nvidia-smi lists 2; name",
        ),
        ("train_dist.sh", 8, {"CUDA_VISIBLE_DEVICES": "0,-1"}, "CUDA_VISIBLE_DEVICES=0,-1 is no list of cards"),
        ("train_dist.sh", 8, {"CUDA_VISIBLE_DEVICES": "GPU-9"}, "CUDA_VISIBLE_DEVICES=GPU-9: no card, or several"),
        ("train_dist.sh", 8, {"CUDA_VISIBLE_DEVICES": "GPU-"}, "CUDA_VISIBLE_DEVICES=GPU-: no card, or several"),
        ("train_dist.sh", 8, {"DEVICES": "GPU-1,0"}, "DEVICES=GPU-1,0 mixes numbers and UUIDs"),
        (
            "train_dist.sh",
            8,
            {"CUDA_VISIBLE_DEVICES": "MIG-5-6,GPU-1"},
            "a process one MIG instance: name one alone",
        ),
        ("train_dist.sh", 8, {"NNODES": "2"}, "MASTER= NNODES=2 NODE_RANK=: give all three, or none"),
        ("train_dist.sh", 8, machines(NNODES="two"), "NNODES=two is no number of machines"),
        ("train_dist.sh", 8, machines(NODE_RANK="2"), "NODE_RANK=2 is no place among 2 machines: choose 0 to 1"),
        ("train_dist.sh", 8, machines(NODE_RANK="-1"), "NODE_RANK=-1 is no place among 2 machines"),
        ("train_dist.sh", 8, machines(MASTER="first"), "MASTER=first is no HOST:PORT"),
        ("train_dist.sh", 8, machines(MASTER=":29500"), "MASTER=:29500 is no HOST:PORT"),
        ("train_dist.sh", 8, machines(MASTER="first:65536"), "MASTER=first:65536 is no HOST:PORT"),
        ("train_dist.sh", 8, machines(NO_WAY="1"), "no way to first from here"),
        ("train_dist.sh", 8, machines(OWN="10.0.0.2"), "MASTER=first:29500 is not this machine, which is 10.0.0.2"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(project, script, cards, env, words):
    project.add_cards(cards)
    result = project.sh(script, "--data-path", "images", **env)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("train: error: ")
    assert words in line
    assert not (project.folder / "call").exists()
    assert list(project.cwd.iterdir()) == []


def test_an_output_folder_that_cannot_be_is_named(project):
    (project.cwd / "file").touch()
    result = project.sh("train_dist.sh", "--output-dir", "file/out")
    assert (result.returncode, "output folder file/out cannot be written" in last_line(result)) == (2, True)
    assert not (project.folder / "call").exists()


def test_a_set_up_that_fails_ends_it(project):
    (project.root / "shell" / "setup.sh").write_text("echo 'setup: error: no network' >&2; exit 2\n")
    for script in ("train.sh", "train_dist.sh"):
        result = project.sh(script)
        assert (result.returncode, result.stderr) == (2, "setup: error: no network\n")


RECIPES = {
    "train_official.sh": {
        **{"epochs": 600, "batch_size": 128, "opt": "rmsprop", "lr": 0.064, "momentum": 0.9, "weight_decay": 1e-5},
        **{"lr_scheduler": "steplr", "lr_step_size": 2, "lr_gamma": 0.973},
        **{"auto_augment": "imagenet", "random_erase": 0.2, "label_smoothing": 0, "model_ema": False},
    },
    "train_simple.sh": {
        **{"epochs": 120, "batch_size": 256, "opt": "sgd", "lr": 0.8, "momentum": 0.9, "weight_decay": 1e-4},
        **{"lr_scheduler": "steplr", "lr_step_size": 30, "lr_gamma": 0.1, "auto_augment": None, "random_erase": 0},
    },
}


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_trains_on_eight_cards(project, framework, script):
    """The flags of torchvision's pull request 3354, which the caller's own follow."""
    project.add_cards(8)
    result = project.sh(script, "--data-path", "images", "--epochs", "7", FRAMEWORK=framework)
    assert result.returncode == 0, result.stderr
    arguments = project.call()[1]
    assert arguments[arguments.index("--nproc_per_node") + 1] == "8"
    args = vars(flags_of(arguments, PACKAGES[framework]))
    expected = {**RECIPES[script], "epochs": 7, "data_path": "images", "model": "mobilenet_v3_small", "device": "gpu"}
    assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_without_data_is_refused(project, script):
    result = project.sh(script, "--epochs", "7")
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("train: error: no --data-path: name a folder")
    assert not (project.folder / "call").exists()


@pytest.mark.parametrize("script", ["train.sh", "train_dist.sh", *RECIPES])
def test_help_is_that_of_the_training_command(project, script, framework):
    assert project.sh(script, "--help", FRAMEWORK=framework).returncode == 0
    assert project.call()[1] == ["-m", f"{PACKAGES[framework]}.train", "--help"]


@pytest.fixture
def real(tmp_path, framework, comma_locale) -> Project:
    """With this Python, and without cards even where there are some."""
    if framework == "paddle" and paddle.device.cuda.device_count() == 1:
        pytest.skip("Paddle's launcher starts no more processes than there are cards, not even on the CPU")
    return Project(tmp_path, Path(sys.executable), comma_locale)


LINE = r"\[Epoch 0, iter: 1\] acc: .*, lr: 0.02500, loss: .*, avg_samples: 4.0, avg_ips: .* images/sec\."
SMALL = "--train-crop-size 64 --val-crop-size 64 --val-resize-size 64 --workers 0 --epochs 1 --batch-size 4"


@pytest.mark.thorough("the port", but="paddle")
def test_train_dist_trains(real, framework):
    """On lite_data, as two processes on the CPU: a line of log, one evaluation of all images, what a run leaves."""
    result = real.sh("train_dist.sh", *SMALL.split(), "--output-dir", "out", FRAMEWORK=framework)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "seed 0, 2 process(es), global batch size 8" in result.stdout
    assert len(re.findall(LINE, result.stdout)) == 1
    assert len(re.findall(r"\[Eval, Epoch 0\] .* samples: 16\n", result.stdout)) == 1
    assert sorted(path.stem for path in (real.cwd / "out").iterdir()) == ["checkpoint", "log", "metrics", "model_0"]
    assert [path.name for path in real.cwd.iterdir()] == ["out"]


@pytest.mark.thorough("test_a_killed_process_takes_the_others_down_and_is_named")
def test_the_message_of_any_process_is_seen(real, framework):
    """The second validation image is the second process's."""
    data = shutil.copytree(ROOT / "lite_data", real.folder / "data")
    image = sorted((data / "val").glob("*/*"))[1]
    image.write_bytes(image.read_bytes()[:3000])
    flags = [*SMALL.split(), "--output-dir", "out", "--data-path", data]
    result = real.sh("train_dist.sh", *flags, FRAMEWORK=framework)
    assert result.returncode == 2
    assert last_line(result).startswith(f"python -m {PACKAGES[framework]}.train: error: image {image} cannot be read")
    assert result.stderr.count("error") == 1
    assert sorted(path.name for path in (real.cwd / "out").iterdir()) == ["log", "metrics.jsonl"]


@pytest.mark.thorough("test_train_dist_trains, test_train_starts_one_process_on_a_card_if_there_is_one")
def test_train_trains(real, framework):
    result = real.sh("train.sh", *SMALL.split(), "--lr", "0.025", FRAMEWORK=framework)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(LINE.replace("iter: 1", "iter: 3"), result.stdout)) == 1
    assert sorted(path.stem for path in (real.cwd / "output").iterdir()) == ["checkpoint", "metrics", "model_0"]


@pytest.fixture
def running(real, framework) -> Iterator[subprocess.Popen]:
    """Two processes on the CPU, with loader workers, that would train for long; they are in the second epoch."""
    flags = [*SMALL.split(), "--epochs", "1000", "--workers", "1", "--output-dir", "my output"]
    line = ["sh", str(real.root / "shell" / "train_dist.sh"), *flags]
    env = real.environment | {"FRAMEWORK": framework, "PYTHONUNBUFFERED": "1"}
    with (real.cwd / "err").open("wb") as err:
        process = subprocess.Popen(line, cwd=real.cwd, env=env, stdout=subprocess.PIPE, stderr=err, text=True)
        try:
            assert any("[Eval, Epoch 0]" in line for line in process.stdout)
            yield process
        finally:
            process.stdout.close()
            for pid in trainers(real.cwd):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def trainers(folder: Path) -> dict[int, str]:
    """{pid: rank, or "" for the launcher and the script} of all that runs in `folder`."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if (path / "cwd").readlink() == folder:
                rank = re.search(rb"\0(?:PADDLE_TRAINER_ID|RANK)=(\d+)\0", (path / "environ").read_bytes())
                found[int(path.name)] = rank[1].decode() if rank else ""
    return found


def ended(folder: Path, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while trainers(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not trainers(folder)


@pytest.mark.thorough("the port", but="paddle")
def test_a_killed_process_takes_the_others_down_and_is_named(running, real, framework):
    os.kill(min(pid for pid, rank in trainers(real.cwd).items() if rank == "1"), signal.SIGKILL)  # not its workers
    assert running.wait(60) not in (0, 2, 143)
    assert ended(real.cwd)
    line = (real.cwd / "err").read_text().splitlines()[-1]
    log = Path(line.partition("see ")[2])
    assert "error: a process was killed or failed" in line and (real.cwd / log).is_file()
    assert (log.name if framework == "paddle" else log.parent.name) == {"paddle": "workerlog.1", "torch": "1"}[
        framework
    ]


@pytest.mark.thorough("test_sigterm_to_all_processes_saves_and_exits, test_sigterm_ends_a_run_after_its_step")
def test_sigterm_reaches_training(running, real, framework):
    running.terminate()
    assert running.wait(60) == 143
    assert ended(real.cwd)
    line = (real.cwd / "err").read_text().splitlines()[-1]
    assert line.startswith(f"python -m {PACKAGES[framework]}.train: stopped by SIGTERM")
    assert (real.cwd / line.partition("--resume ")[2]).is_file()
