"""The scripts in shell/: what set-up does and refuses, with a stand-in for Python, so without network or installing."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = ("requirements.txt", "pyproject.toml", "portproof/pyproject.toml", "sturdyio/pyproject.toml")
TOOLS = ("cat", "cksum", "cp", "date", "dirname", "ls", "mkdir", "mv", "rm", "sed", "sh", "sleep", "tee", "uname")

# Makes "environments" that hold a copy of itself, notes other calls of a module or of the ladder, and else is Python.
# PyTorch's index has what OFFERED says; without it nobody can reach the index.
STAND_IN = f"""#!/bin/sh
case "$*" in
    "-m pip --version") ;;
    "-m venv --clear "*)
        rm -rf "$4"
        mkdir -p "$4/bin"
        echo >"$4/pyvenv.cfg"
        cp "$0" "$4/bin/python" ;;
    *" index versions "*)
        (IFS='|'; echo "$PWD: $*") >>"$CALLS"
        [ "${{OFFERED:-}}" != later ] || exec sleep 60
        [ -n "${{OFFERED:-}}" ] && echo "torch (1.0)" && echo "Available versions: $OFFERED" ;;
    "-m "*|*/steps/run_all.py*)
        (IFS='|'; echo "$PWD: $*") >>"$CALLS"
        if [ -n "${{FAILS:-}}" ]; then echo "ERROR: no network"; exit 1; fi ;;
    *) exec "{sys.executable}" -S "$@" ;;
esac
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Project:
    """A copy of the scripts and of the files they read, with a PATH that holds no Python but what a test adds."""

    def __init__(self, folder: Path, locale: dict[str, str]) -> None:
        self.locale = locale
        self.root = folder / "a project"
        shutil.copytree(ROOT / "shell", self.root / "shell")
        for name in FILES:
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.venv = self.root / ".venv"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        # 10 s take a tenth of a second; another limit is no number
        script(self.bin / "timeout", f'#!/bin/sh\n[ "$1" = 10 ] && shift && exec {shutil.which("timeout")} 0.1 "$@"\n')
        self.calls_file = folder / "calls"

    def add_python(self, name: str, text: str = STAND_IN) -> Path:
        return script(self.bin / name, text)

    def sh(self, name: str, *args: str, cwd: Path | None = None, **env: str | Path):
        return subprocess.run(
            ["sh", str(self.root / "shell" / name), *args],
            cwd=cwd or self.root,
            env={
                "PATH": str(self.bin),
                "CALLS": str(self.calls_file),
                **self.locale,
                **{k: str(v) for k, v in env.items()},
            },
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    def calls(self) -> list[str]:
        """The module calls since the last time this was asked."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return calls

    def installs(self) -> int:
        return sum("|-r|" in call for call in self.calls())


@pytest.fixture
def project(tmp_path: Path, comma_locale) -> Project:
    """Of a user with a decimal comma."""
    return Project(tmp_path, comma_locale)


def python_of_version(version: str) -> str:
    return f"#!/bin/sh\necho {version}\n"


def assert_refused(result: subprocess.CompletedProcess, *words: str) -> None:
    """Status 2, nothing on stdout, and one line on stderr that has every one of `words`."""
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("setup: error: ") and result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.13"])
def test_python_out_of_range_is_refused(project, version):
    python = project.add_python("some-python", python_of_version(version))
    assert_refused(project.sh("setup.sh", PYTHON=python), f"{python} ({version})", "3.10, 3.11 or 3.12")
    assert not project.venv.exists()


def test_no_fitting_python_on_path_names_all_versions_found(project):
    assert_refused(project.sh("setup.sh"), "found none")
    project.add_python("python3", python_of_version("3.9"))
    project.add_python("python", python_of_version("2.7"))
    assert_refused(project.sh("setup.sh"), "python3 (3.9), python (2.7)")
    assert_refused(project.sh("setup.sh", PYTHON="/no/python"), "/no/python")


def test_names_that_do_not_run_or_do_not_fit_are_passed_over(project):
    project.add_python("python3.12", "#!/bin/sh\necho 'python3.12: not installed' >&2\nexit 127\n")
    project.add_python("python3.11", python_of_version("3.13"))
    project.add_python("python3")
    result = project.sh("setup.sh")
    assert (result.returncode, result.stdout) == (0, f"{project.venv}/bin/python\n"), result.stderr
    assert "not installed" not in result.stderr


def test_python_without_venv_names_the_package_to_install(project):
    without = STAND_IN.replace("case", 'case "$*" in *ensurepip*) exit 1 ;; esac\ncase', 1)
    project.add_python("python3", without)
    assert_refused(project.sh("setup.sh"), "python3 (3.1", "apt install python3-venv")


@pytest.mark.parametrize("changed", FILES)
def test_installs_once_and_again_when_a_file_changed(project, changed):
    project.add_python("python3")
    assert project.sh("setup.sh").returncode == 0
    assert project.installs() == 1
    again = project.sh("setup.sh")
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{project.venv}/bin/python\n", "")
    assert project.installs() == 0
    with (project.root / changed).open("a") as file:
        file.write("# changed\n")
    assert project.sh("setup.sh").returncode == 0
    assert project.installs() == 1


def test_a_port_that_is_shipped_alone_is_installed_without_the_kit(project):
    project.add_python("python3")
    for kept, left_out in ((["sturdyio/", "portproof/", ""], None), (["sturdyio/", ""], "portproof")):
        if left_out:
            shutil.rmtree(project.root / left_out)
        assert project.sh("setup.sh").returncode == 0
        installed = project.calls()[-1].partition("requirements.txt|")[2]
        assert installed == "|".join(f"-e|{project.root}/{folder}".rstrip("/") for folder in kept)


def test_failed_install_is_done_again(project):
    project.add_python("python3")
    failed = project.sh("setup.sh", FAILS="yes")
    assert failed.returncode == 2
    assert "ERROR: no network" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("setup: error: pip could not install")
    assert not (project.venv / "setup.stamp").exists()
    project.calls()
    assert project.sh("setup.sh").returncode == 0
    assert project.installs() == 1


def test_failed_update_is_done_again_although_the_files_are_back(project):
    project.add_python("python3")
    assert project.sh("setup.sh").returncode == 0
    requirements = project.root / "requirements.txt"
    before = requirements.read_text()
    requirements.write_text("nothing-of-this-name==1\n")
    assert project.sh("setup.sh", FAILS="yes").returncode == 2
    requirements.write_text(before)
    project.calls()
    assert project.sh("setup.sh").returncode == 0
    assert project.installs() == 1


def test_environment_of_another_copy_of_the_project_is_installed_again(project, tmp_path):
    project.add_python("python3")
    (tmp_path / "other").mkdir()
    other = shutil.copytree(project.root, tmp_path / "other" / "copy")
    for root, installs in ((project.root, 1), (other, 1), (other, 0), (project.root, 1)):
        project.root = root
        assert project.sh("setup.sh", VENV=tmp_path / "venv").returncode == 0
        assert project.installs() == installs


def test_environment_whose_interpreter_is_gone_is_made_again(project):
    project.add_python("python3")
    assert project.sh("setup.sh").returncode == 0
    python = project.venv / "bin" / "python"
    python.unlink()
    python.symlink_to("/no/python")
    project.calls()
    assert project.sh("setup.sh").returncode == 0
    assert project.installs() == 1


PINS = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split() if "==" in line)
TORCH, PADDLE = PINS["torch"], PINS["paddlepaddle"]
INDEX = "--extra-index-url|https://www.paddlepaddle.org.cn/packages/stable"


def distributions(folder: Path, installed: dict[str, str]) -> dict[str, Path]:
    """The environment variable with which Python finds these distributions, {name: version}, installed."""
    for name, version in installed.items():
        script(folder / f"{name}-{version}.dist-info" / "METADATA", f"Name: {name}\nVersion: {version}\n")
    return {"PYTHONPATH": folder}


@pytest.mark.parametrize(
    "installed, cuda, first, label, paddle",
    [
        ({}, "", [], "", True),
        ({"torch": TORCH, "paddlepaddle": PADDLE}, "", [], "", True),
        ({"torch": f"{TORCH}+cpu", "paddlepaddle": "3.2.0"}, "", [], "+cpu", True),
        # what was installed by hand stays what it is, and gets newer versions of the same build
        ({"torch": f"{TORCH}+cu126", "paddlepaddle_gpu": PADDLE}, "", [], "+cu126", False),
        ({"torch": TORCH, "paddlepaddle_gpu": PADDLE}, "", [], "", False),
        ({"torch": "2.13.0+cu126", "paddlepaddle": PADDLE}, "", [], "+cu126", True),
        ({"torch": "2.13.0+git1a2b"}, "", [], "", True),
        (
            {"torch": "2.13.0+cu126", "paddlepaddle_gpu": "3.2.0"},
            "",
            [f"install|paddlepaddle-gpu=={PADDLE}|{INDEX}/cu126/"],
            "+cu126",
            False,
        ),
        # one over the other leaves half of each
        (
            {"torch": f"{TORCH}+cu126", "paddlepaddle_gpu": PADDLE, "paddlepaddle": PADDLE},
            "",
            ["uninstall|-y|paddlepaddle|paddlepaddle-gpu", f"install|paddlepaddle-gpu=={PADDLE}|{INDEX}/cu126/"],
            "+cu126",
            False,
        ),
        ({}, "cu130", [f"install|paddlepaddle-gpu=={PADDLE}|{INDEX}/cu130/"], "+cu130", False),
        (
            {"torch": TORCH, "paddlepaddle": PADDLE},
            "cu130",
            ["uninstall|-y|paddlepaddle", f"install|paddlepaddle-gpu=={PADDLE}|{INDEX}/cu130/"],
            "+cu130",
            False,
        ),
        (
            {"torch": f"{TORCH}+cu126", "paddlepaddle_gpu": PADDLE},
            "cu130",
            ["uninstall|-y|paddlepaddle-gpu", f"install|paddlepaddle-gpu=={PADDLE}|{INDEX}/cu130/"],
            "+cu130",
            False,
        ),
        ({"torch": f"{TORCH}+cu130", "paddlepaddle_gpu": PADDLE}, "cu130", [], "+cu130", False),
        (
            {"torch": f"{TORCH}+cu130", "paddlepaddle_gpu": PADDLE},
            "cpu",
            ["uninstall|-y|paddlepaddle-gpu"],
            "+cpu",
            True,
        ),
    ],
)
def test_builds_are_those_that_are_asked_for_or_there(project, tmp_path, installed, cuda, first, label, paddle):
    """What pip is told, in order, and the requirements that it gets: all others as they are."""
    project.add_python("python3")
    env = distributions(tmp_path / "site", installed) | ({"CUDA": cuda} if cuda else {})
    assert project.sh("setup.sh", **env).returncode == 0
    calls = [call.partition("--no-input|")[2] for call in project.calls()]
    _, *commands, last = [call for call in calls if "index|versions" not in call]
    assert commands == first
    assert last.startswith(f"install|-r|{project.venv}/requirements.txt|-e|")
    before = (project.root / "requirements.txt").read_text().splitlines()
    after = (project.venv / "requirements.txt").read_text().splitlines()
    if label:
        assert after.pop(0) == f"--extra-index-url https://download.pytorch.org/whl/{label[1:]}"
    changed = [f"{line}{label}" if line.startswith(("torch==", "torchvision==")) else line for line in before]
    assert after == [line for line in changed if paddle or not line.startswith("paddlepaddle==")]


NO_CARD = not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidia0").exists()


@pytest.mark.parametrize(
    "card, offered, label, said",
    [
        (True, f"{TORCH}+cpu", "", "an NVIDIA card is here: the builds that pip finds"),
        *(
            pytest.param(*case, marks=pytest.mark.skipif(not NO_CARD, reason="this machine has an NVIDIA card"))
            for case in (
                (False, f"2.99.0+cpu, {TORCH}+cpu", "+cpu", "no NVIDIA card is seen: PyTorch's CPU build"),
                (False, "2.13.0+cpu", "", f"did not offer torch {TORCH}+cpu within 10 s: the build that pip finds"),
                (False, "", "", f"did not offer torch {TORCH}+cpu within 10 s: the build that pip finds"),
                (False, "later", "", f"did not offer torch {TORCH}+cpu within 10 s: the build that pip finds"),
            )
        ),
    ],
)
def test_a_new_environment_gets_the_cpu_build_where_no_card_is_seen(project, card, offered, label, said):
    """PyTorch's index is asked once, if at all; what is chosen stays."""
    project.add_python("python3")
    if card:
        script(project.bin / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    result = project.sh("setup.sh", OFFERED=offered)
    assert result.returncode == 0 and said in result.stderr
    assert ("at first 1 GB to download, 3 GB on disk" if label else "at first 3 GB to download") in result.stderr
    questions = [call for call in project.calls() if "index|versions" in call]
    assert len(questions) == (not card) and all("|--retries|0|" in question for question in questions)
    assert f"torch=={TORCH}{label}" in (project.venv / "requirements.txt").read_text().splitlines()
    assert project.sh("setup.sh", OFFERED=offered).stderr == ""


def test_a_machine_with_cards_is_set_up_in_one_command(project):
    project.add_python("python3")

    def run(**env: str) -> int:
        """How often pip installed the requirements."""
        result = project.sh("run_steps.sh", "--device", "gpu", **env)
        assert result.returncode == 0, result.stderr
        calls = project.calls()
        assert calls[-1].endswith("run_all.py|--device|gpu")
        return sum("|-r|" in call for call in calls)

    assert [run(CUDA="cu130"), run(CUDA="cu130"), run(), run(CUDA="cu126"), run(CUDA="cpu"), run()] == [
        1,
        0,
        0,
        1,
        1,
        0,
    ]
    for build in ("13.0", "cu13", "/usr/local/cuda"):
        assert_refused(project.sh("setup.sh", CUDA=build), f"CUDA={build} is no build", "such as cu130, or cpu")


def test_folder_that_is_no_environment_is_left_alone(project, tmp_path):
    project.add_python("python3")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "photo").write_text("dear to me")
    assert_refused(project.sh("setup.sh", VENV=mine), str(mine), "no virtual environment")
    assert [file.name for file in mine.iterdir()] == ["photo"]
    script(mine / "bin" / "python", python_of_version("3.13"))
    assert_refused(project.sh("setup.sh", VENV=mine), str(mine), "3.13")


def test_two_set_ups_at_once_are_refused_and_a_left_lock_is_not(project):
    project.add_python("python3")
    lock, here = project.root / ".venv.lock", os.uname().nodename
    gone = subprocess.Popen(["true"])
    gone.wait()
    for process, machine in ((os.getpid(), here), (gone.pid, "another")):  # whose processes have other numbers
        lock.write_text(f"{process} {machine} 2026-01-02 03:04:05\n")
        words = f"process {process} of {machine} has been setting up {project.venv} since 2026-01-02 03:04:05"
        assert_refused(project.sh("setup.sh"), words, str(lock))
        assert lock.read_text().startswith(f"{process} {machine}")
    for left in (f"{gone.pid} {here} 2026-01-02 03:04:05\n", ""):
        lock.write_text(left)
        assert project.sh("setup.sh").returncode == 0
        assert list(project.root.glob(".venv.lock*")) == []
        (project.venv / "setup.stamp").unlink()


@pytest.mark.parametrize("left", [False, True])
def test_of_several_set_ups_that_start_at_once_one_installs(project, left):
    """The interpreter takes its time; the machines' names differ. A lock that was left makes no difference."""
    project.add_python("python3", STAND_IN.replace("case", 'case "$*" in *" -r "*) sleep 2 ;; esac\ncase', 1))
    (project.bin / "uname").unlink()
    project.add_python("uname", '#!/bin/sh\necho "${MACHINE:-node}"\n')
    if left:
        gone = subprocess.Popen(["true"])
        gone.wait()
        (project.root / ".venv.lock").write_text(f"{gone.pid} node 2026-01-02 03:04:05\n")
    with ThreadPoolExecutor() as pool:
        names = ["node"] * 4 if left else [f"node{number}" for number in range(4)]
        results = list(pool.map(lambda name: project.sh("setup.sh", MACHINE=name), names))
    assert project.installs() == 1
    refused = [result for result in results if result.returncode]
    assert len(refused) == 3
    assert all("has been setting up" in result.stderr for result in refused)


def test_test_sh_runs_pytest_in_the_project_with_the_callers_flags(project, tmp_path):
    project.add_python("python3")
    result = project.sh("test.sh", "-k", "a b", cwd=tmp_path, VENV="env")
    assert result.returncode == 0, result.stderr
    flags = "-n|auto|--dist|loadfile|--no-loadscope-reorder"
    assert project.calls()[-1] == f"{project.root}: -m|pytest|{flags}|-k|a b"
    assert (tmp_path / "env" / "setup.stamp").exists()


def test_run_steps_sh_runs_the_ladder_where_it_is_called(project, tmp_path):
    project.add_python("python3")
    result = project.sh("run_steps.sh", "--output-dir", "out dir", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    script = project.root / "shell" / ".." / "steps" / "run_all.py"
    assert project.calls()[-1] == f"{tmp_path}: {script}|--output-dir|out dir"


@pytest.mark.parametrize("name", ["test.sh", "run_steps.sh"])
def test_exit_status_is_that_of_the_job_and_of_set_up(project, name):
    assert_refused(project.sh(name), "found none")
    project.add_python("python3")
    assert project.sh("setup.sh").returncode == 0
    assert project.sh(name, FAILS="yes").returncode == 1
