"""Environments of other packages: what is installed, when it is done again, how a failure is told. Pip is a fake."""

import pytest

from tests.scripts.loading import load_script

environments = load_script("peer_environments")


class Pip:
    """Writes down what it is called with; makes the interpreter that the real one would."""

    def __init__(self, folder, fails_at=None):
        self.folder, self.calls, self.fails_at = folder, [], fails_at

    def __call__(self, command, log):
        self.calls.append([str(word) for word in command])
        if self.fails_at is not None and self.fails_at in self.calls[-1]:
            raise environments.BuildError("pip install failed: no such thing (log: x.log)")
        if command[1:3] == ["-m", "venv"]:
            python = environments.python_of(self.folder, command[-1].rpartition("/")[2])
            python.parent.mkdir(parents=True)
            python.write_text("")

    def installed(self):
        return [call[call.index("-c") + 2 :] for call in self.calls if "install" in call]


@pytest.mark.parametrize("name", list(environments.RECIPES))
def test_torch_comes_first_and_stays(name, tmp_path):
    pip = Pip(tmp_path)
    assert environments.build(tmp_path, name, pip) == tmp_path / name / "bin" / "python"
    installed = pip.installed()
    assert installed[0] == ["torch==2.13.0"] and "torch==2.13.0" in installed[-1]
    assert {"gymnasium-robotics==1.4.2", "mujoco<3.12"} <= set(installed[-1])
    assert any(f"{name}=={environments.RECIPES[name].version}" in words for words in installed)
    constraints = (tmp_path / f"{name}.constraints.txt").read_text().splitlines()
    assert {"torch==2.13.0", "mujoco==3.11.0", "gymnasium==1.4.0"} <= set(constraints)
    assert "torch.__version__" in pip.calls[-1][-1]
    assert environments.missing(tmp_path, name) is None


def test_a_package_is_not_held_to_what_it_contradicts(tmp_path):
    pip = Pip(tmp_path)
    environments.build(tmp_path, "tianshou", pip)
    assert pip.installed()[1] == ["--no-deps", "tianshou==2.0.1"]
    assert not any("tianshou==2.0.1" in words for words in pip.installed()[2:])
    free, held = (environments.constraints_of(name) for name in ("tianshou", "skrl"))
    assert "matplotlib==3.11.2" not in free and "matplotlib==3.11.2" in held
    assert not any(line.startswith("stable") for line in environments.constraints_of("stable-baselines3"))


def test_what_is_there_is_not_built_again_unless_it_would_be_another(tmp_path, monkeypatch):
    environments.build(tmp_path, "skrl", Pip(tmp_path))
    again = Pip(tmp_path)
    environments.build(tmp_path, "skrl", again)
    assert again.calls == []
    recipe = environments.RECIPES["skrl"]._replace(version="9.9")
    monkeypatch.setitem(environments.RECIPES, "skrl", recipe)
    assert "peers --against skrl" in environments.missing(tmp_path, "skrl")


def test_of_the_pins_those_of_what_is_there_count(tmp_path, monkeypatch):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.13.0\nnumpy==2.4.6\npytest==9.2.0\n")
    monkeypatch.setattr(environments, "CONSTRAINTS", constraints)
    package = tmp_path / "skrl/lib/python3.11/site-packages/NumPy-2.4.6.dist-info"
    pip = Pip(tmp_path)

    def run(command, log):
        pip(command, log)
        package.mkdir(parents=True, exist_ok=True)
        (package / "METADATA").write_text("Name: NumPy\nVersion: 2.4.6\n")

    environments.build(tmp_path, "skrl", run)
    constraints.write_text(constraints.read_text().replace("9.2.0", "9.3.0"))
    assert environments.missing(tmp_path, "skrl") is None
    constraints.write_text(constraints.read_text().replace("2.4.6", "2.5.0"))
    assert "other versions" in environments.missing(tmp_path, "skrl")


def test_an_unfinished_environment_is_missing(tmp_path):
    assert "no environment of skrl" in environments.missing(tmp_path, "skrl")
    with pytest.raises(environments.BuildError, match="no such thing"):
        environments.build(tmp_path, "skrl", Pip(tmp_path, "skrl==2.1.1"))
    assert "unfinished" in environments.missing(tmp_path, "skrl")
    (tmp_path / "skrl" / environments.STAMP).write_text("[")
    assert "unfinished" in environments.missing(tmp_path, "skrl")


def test_a_command_that_fails_is_told_by_its_error(tmp_path):
    log = tmp_path / "x.log"
    script = "print('ERROR: no matching distribution'); print('notice'); raise SystemExit(1)"
    with pytest.raises(environments.BuildError, match="failed: ERROR: no matching distribution.*x.log"):
        environments.call([environments.sys.executable, "-c", script], log)
    with pytest.raises(environments.BuildError, match="No such file"):
        environments.call([str(tmp_path / "python"), "-m", "pip"], log)


def test_a_command_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "DEADLINE", 0.1)
    with pytest.raises(environments.BuildError, match=r"took longer than 0\.1 s"):
        environments.call([environments.sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "x.log")


def test_a_folder_that_cannot_be_made_is_told_with_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(environments.BuildError, match="--peers-folder"):
        environments.build(tmp_path / "file", "skrl", Pip(tmp_path))


def test_the_command_builds_the_others_where_one_fails(tmp_path, monkeypatch, capsys):
    benchmark = load_script("benchmark")
    asked = []

    def build(folder, name):
        asked.append(name)
        if name == "skrl":
            raise benchmark.BuildError("pip install failed")

    monkeypatch.setattr(benchmark, "build", build)
    arguments = ["peers", "--against", "skrl,torchrl", "--peers-folder", str(tmp_path)]
    assert benchmark.main(arguments) == 1 and asked == ["skrl", "torchrl"]
    assert capsys.readouterr().err == "benchmark: error: skrl: pip install failed\n"
