"""The README: its example runs, its commands are those of CI, its limits are the code's."""

import re
from pathlib import Path

import hkv

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_example_runs_and_reuses_all_but_the_last_token(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.strip().splitlines()) < 20
    exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "reuse 0, prefill 52" in said and "reuse 51, prefill 1" in said


def test_ci_runs_the_readme_s_test_command():
    commands = re.findall(r"```bash\n(.*?)\n```", README, re.S)
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


def test_every_public_function_has_a_docstring():
    names = [n for n in dir(hkv) if not n.startswith("_") and callable(getattr(hkv, n))]
    assert [n for n in names if not (getattr(hkv, n).__doc__ or "").strip()] == []


def test_importing_the_library_needs_neither_flax_nor_orbax():
    import subprocess
    import sys

    code = "import sys, hkv; print(sorted({'flax', 'orbax'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
