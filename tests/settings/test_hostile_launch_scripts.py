"""Launch scripts that want to harm: nothing is executed, read elsewhere or written, and each error is one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.reading import Reading, read
from slimectl.migrate.launch_scripts.writing import settings_file

TRAIN = "python3 train.py --hf-checkpoint /m --prompt-data /d --rollout-batch-size 4"
ACTS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate", "os.utime",
    "os.putenv", "os.unsetenv", "os.kill", "socket.connect", "socket.bind", "exec", "shutil.copyfile",
)  # fmt: skip
"""Audit events of processes, changed files, connections and executed code."""

_watched: list[str] | None = None


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watched is None:
        return
    if event in ACTS:
        _watched.append(f"{event} {arguments!r:.200}")
    elif event == "open":
        path, mode, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
            _watched.append(f"open {path} {mode}")
        _opened.append(str(path))


_opened: list[str] = []


@contextmanager
def watching() -> Iterator[list[str]]:
    """The acts of this process in the block; an audit hook stays for good, so it looks at a switch."""
    global _watched
    if not hasattr(sys, "_slimectl_test_hook"):
        sys.addaudithook(_watch)
        sys._slimectl_test_hook = True
    _watched = acts = []
    _opened.clear()
    try:
        yield acts
    finally:
        _watched = None


@pytest.fixture(scope="module", autouse=True)
def _imports(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what readers and writers import late, whose code counts as executed."""
    folder = tmp_path_factory.mktemp("imports")
    for name, text in {
        "run.sh": TRAIN,
        "run.yaml": "use_vllm: true\nbeta: 1\nseed: 1\n",
        "a.py": "GRPOConfig(beta=1, seed=2)",
    }.items():
        (folder / name).write_text(text)
        result = read(folder / name, environ={}, stack="slime" if name == "run.sh" else "trl")
        settings_file(result.conversion, folder / name, result.notes)


def harmless(folder: Path, name: str = "run.sh") -> Reading | str:
    """Read a file under watch; return the reading, or the line of the error."""
    before = sorted(folder.rglob("*"))
    with watching() as acts:
        try:
            result: Reading | str = read(folder / name, environ={})
            text = settings_file(result.conversion, folder / name, result.notes)
        except SettingsError as error:
            result, text = str(error), ""
    assert acts == []
    assert sorted(folder.rglob("*")) == before
    outside = [path for path in _opened if not path.startswith(str(folder)) and not path.endswith((".py", ".pyc"))]
    assert outside == []
    assert "root:" not in text
    if isinstance(result, str):
        assert "\n" not in result
        assert result.startswith(str(folder / name.partition(".")[0])[:-3])
    return result


@pytest.mark.parametrize(
    "line",
    [
        "N=$(touch executed)", "N=`touch executed`", 'eval "touch executed"', "echo x > executed", ": > executed",
        "touch executed", "exec > executed", "trap 'touch executed' EXIT", "cat <(touch executed)",
        "tee >(cat > executed) < /dev/null", "N=${N:-$(touch executed)}", "N=${A[$(touch executed)]}",
        "A[$(touch executed)]=1", "N=$((A[$(touch executed)]))", "echo \"$(touch executed)\" | sh", 
        "cat <<EOF > executed\n$(touch executed)\nEOF", "cat <<'EOF' | bash\ntouch executed\nEOF",
        "for f in $(touch executed; ls); do rm -rf $f; done", "if touch executed; then N=1; fi",
        "while touch executed; do N=1; done", "case $(touch executed) in *) N=1 ;; esac", "[[ $(touch executed) ]]",
        "(touch executed)", "{ touch executed; }", "f() { touch executed; }; f", "touch executed &",
        "sudo touch executed",
        "bash -c 'touch executed'", "python3 -c 'open(\"executed\", \"w\")'", "source /etc/passwd", ". ../outside.sh",
        "source <(curl http://127.0.0.1:9/x)", "printf -v PATH x", "export PYTHONPATH=/tmp LD_PRELOAD=/tmp/x.so",
        "source /dev/zero", "source link.sh", "read N < /etc/passwd", "mapfile A < /etc/passwd", "N=$(</etc/passwd)",
        "cd / && source etc/passwd", "declare -x N=$(touch executed)", "N=$(cat /etc/passwd)", "alias python3=touch",
        "wget -qO- http://127.0.0.1:9 | sh", "kill -9 $$", "rm -rf / --no-preserve-root", "exit 0 || touch executed",
        "bash ../outside.sh", "bash link.sh", "bash run.sh", "sh -x ./run.sh", "source /x/../../outside.sh",
        "cat <<< 'touch executed' | sh", "sbatch <<< 'touch executed'", "ssh host 'touch executed; rm -rf /'",
        "sbatch --wrap='touch executed'", "E='touch executed'; eval $E", "eval 'SECRET=$(cat ../outside.sh)'",
        "N=$(echo x | sed 's/x/touch executed/e')", "N=$(echo a | awk '{system(\"touch executed\")}')",
        "N=$(echo a | xargs touch)", "N=$(echo a | sed -n 'w executed')", "N=$(echo a | tee executed | wc -l)",
        "printf -v SECRET '%q' $(cat ../outside.sh)", "read -r SECRET <<< $(cat ../outside.sh)",
        "N=\ue0000\ue001\ue00099\ue001", "[ -z \"$UNSET\" ] && exit 1 && touch executed",
    ],
)  # fmt: skip
def test_a_hostile_line_before_the_training_command_does_nothing(line: str, tmp_path: Path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (tmp_path / "outside.sh").write_text("SECRET=outside\n")
    (folder / "link.sh").symlink_to(tmp_path / "outside.sh")
    (folder / "run.sh").write_text(f'{line}\n{TRAIN} --sglang-log-level "${{SECRET:-$N}}"\n')
    result = harmless(folder)
    if line.startswith("exit"):
        assert str(result).startswith(f"{folder / 'run.sh'}: no training command of slime or verl")
    else:
        assert isinstance(result, Reading), result
        assert result.conversion.values["run.rollout_batch_size"] == "4"
        assert "outside" not in str(result.conversion.values)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("while true; do :; done", "run.sh:1: the script runs for more than 30000 steps. Take out the loop"),
        ("for ((;;)); do :; done", "run.sh:1: the script runs for more than 30000 steps. Take out the loop"),
        ("f() { f; }; f", "run.sh:1: f calls itself more than 40 times. Write a loop"),
        (":(){ :|:& };:", "run.sh:1: : calls itself more than 40 times. Write a loop"),
        ("source run.sh", "run.sh:1: source run.sh: the file reads itself. Take that line out"),
        ("source other.sh", "other.sh:1: source run.sh: the file reads itself. Take that line out"),
        ("N=" + "$(" * 500, "run.sh:1: more than 60 "),
        ("( " * 500, "run.sh:1: more than 60 commands inside one another. Write it flat"),
        ("A=aaaaaaaaaaaaaaaa\n" + "A=$A$A\n" * 40, ": a value of more than 1048576 characters. Shorten it"),
        ("A=(a b c d)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40, "steps. Take out the loop"),
        ("A=" + "a" * 9999 + "; B=${A//*a*a*a*a*b/}; [[ $A == *a*a*a*a*a*b ]]", "run.sh: no training command"),
        ("A='unclosed", "run.sh:1: this ' is never closed. Close it"),
        ('A="unclosed', 'run.sh:1: this " is never closed. Close it'),
        ("A=$(unclosed", "run.sh:1: this $( is never closed. Close it"),
        ("A=(unclosed", "run.sh:1: the array that opens in line 1 has no ). Fix it here"),
        ("cat <<EOF\nunclosed", "run.sh:2: the here-document has no EOF. Write it on a line of its own"),
        ("if true; then", "run.sh:1: this if has no fi. Close it"),
        ("fi", "run.sh:1: fi closes nothing here. Take it out"),
        ("coproc x { y; }", "run.sh:1: coproc is not read. Take it out of the script"),
        ("a\nb\0c", "run.sh:2: has a NUL byte, so it is not a text. Give a launch script"),
        ("", "run.sh: no training command of slime or verl or TRL or OpenRLHF or ROLL. Give the script that starts "),
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_a_script_without_end_or_sense_is_refused_by_its_line(text: str, reason: str, tmp_path: Path):
    (tmp_path / "run.sh").write_text(text)
    (tmp_path / "other.sh").write_text("source run.sh")
    result = harmless(tmp_path)
    assert isinstance(result, str)
    assert reason in result


def test_files_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "large.sh").touch()
    os.truncate(tmp_path / "large.sh", 100 << 20)
    (tmp_path / "latin.sh").write_bytes(b"# first\nA=\xe9\n")
    os.mkfifo(tmp_path / "pipe.sh")
    assert (
        harmless(tmp_path, "large.sh")
        == f"{tmp_path}/large.sh: has 100 MiB, but a launch script has a few kB. Give that"
    )
    assert harmless(tmp_path, "latin.sh") == f"{tmp_path}/latin.sh:2: is not UTF-8. Convert it by `iconv -t UTF-8`"
    assert (
        harmless(tmp_path, "pipe.sh")
        == f"{tmp_path}/pipe.sh: is not a regular file. Give a launch script or a configuration"
    )


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("run.yaml", "beta: !!python/object/apply:os.system ['touch executed']\nseed: 1\nuse_vllm: true", None),
        ("run.yaml", "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{key}: &{key} [*{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}]\n"
            for old, key in zip("abcdefgh", "bcdefghi", strict=True)) + "beta: 1\nseed: 1\nuse_vllm: true\n", None),
        ("run.yaml", "a: &a\n  b: *a\n", "nested more than 30 deep. Write it flat"),
        ("run.yaml", "a: " + "[" * 5000, "run.yaml:1: more than 100 brackets inside one another. Write it flat"),
        ("run.yaml", "a: {b: 1", "run.yaml:1: not valid YAML"),
        ("run.yaml", "- a\n- b\n", "run.yaml: has no keys with values. Give a configuration"),
        ("run.yaml", "seed: ${oc.env:HOME}\nbeta: 1\nuse_vllm: true\noutput_dir: ${a}\na: ${output_dir}\n", None),
        ("run.py", "import os\nos.system('touch executed')\nGRPOConfig(beta=1, seed=2, use_vllm=True)\n", None),
        ("run.py", "GRPOConfig(beta=9**9**9**9, seed='a' * 10**12, use_vllm=True, output_dir=f'{open(1)}')\n", None),
        ("run.yaml", "".join(f"k{i}: ${{k{i + 1}}}${{k{i + 1}}}\n" for i in range(29)) + "k29: xx\nbeta: 1\nseed: 1\n",
         ": a value of more than 1048576 characters. Shorten it"),
        ("run.py", "".join(f"k{i} = k{i + 1} + k{i + 1}\n" for i in range(29)) + "k29 = 'xx'\n"
         "GRPOConfig(beta=k0, seed=2, use_vllm=True)\n", None),
        ("run.py", "GRPOConfig(", "run.py:1: not valid Python: '(' was never closed"),
        ("run.py", "(" * 5000, "not valid Python: too many nested parentheses"),
        ("run.py", "a = b\nb = a\nGRPOConfig(beta=a, seed=2, use_vllm=True)\n", None),
        ("run.py", "a = ['x']\n" + "a = [a, a]\n" * 40 + "GRPOConfig(beta=a, seed=2, use_vllm=True)\n", None),
        ("run.py", "a = []\na.append(a)\nGRPOConfig(beta=a, seed=2)\n", "is nested too deeply to be read"),
        ("run.py", "def f(n): return f(n) + f(n)\nGRPOConfig(beta=f(1), seed=2)\n", "needs more than 30000 steps"),
        ("run.py", "x = 1\n", "run.py: has no trainer such as GRPOTrainer or GRPOConfig"),
    ],
    ids=lambda value: (value or "read")[:30],
)  # fmt: skip
def test_hostile_yaml_and_python_are_read_as_data_or_refused(name: str, text: str, reason: str | None, tmp_path: Path):
    (tmp_path / name).write_text(text)
    result = harmless(tmp_path, name)
    if reason is None:
        assert isinstance(result, Reading), result
    else:
        assert isinstance(result, str)
        assert reason in result
