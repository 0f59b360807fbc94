"""The kernels in which notebooks are tested: forked, and yet new processes."""

import os

import pytest
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import local_provisioner

import kernels

if not hasattr(os, "fork"):
    pytest.skip("kernels are forked", allow_module_level=True)


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_THE_SERVER", "alone")
        server = kernels.KernelServer(
            (
                "numpy.random:rand",
                "ipykernel.kernelapp",
                "ipykernel.ipkernel",
                "json:loads",
            )
        )
    yield server
    server.close()


@pytest.fixture
def start(server, monkeypatch):
    "Starts a kernel and gives what runs a line in it and returns its output."
    monkeypatch.setenv(kernels.ADDRESS, server.address)
    monkeypatch.setattr(local_provisioner, "launch_kernel", kernels.launch)
    started = []

    def new(**kwargs):
        manager = KernelManager()
        manager.start_kernel(**kwargs)
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        started.append((manager, client))

        def ask(line):
            said = []
            client.execute_interactive(
                line,
                timeout=60,
                output_hook=lambda message: said.append(
                    message["content"].get("text", "")
                ),
            )
            return "".join(said).strip()

        ask.manager = manager
        ask.client = client
        return ask

    yield new
    for manager, client in started:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_kernel_is_a_new_process(server, start, tmp_path):
    one = start(cwd=str(tmp_path))
    two = start()
    assert one("import os; print(os.getcwd())") == str(tmp_path)
    assert one("print(os.getppid())") == str(server.process.pid)
    assert one("import sys; print('tformer' in sys.modules)") == "False"
    assert one("print('numpy' in sys.modules, __name__)") == "True __main__"
    drawn = "import numpy, random; print(numpy.random.rand(), random.random())"
    assert one(drawn).split()[0] != two(drawn).split()[0]
    assert one(drawn).split()[1] != two(drawn).split()[1]
    # it sees how its own children end
    assert one("import subprocess; print(subprocess.call('exit 3', shell=1))") == "3"
    one("left = 1")
    assert two("print('left' in globals())") == "False"


def test_a_kernel_has_the_environment_that_is_asked_for(start, tmp_path):
    (tmp_path / "only_here.py").write_text("value = 7\n", encoding="utf-8")
    ask = start(env=os.environ | {"PYTHONPATH": str(tmp_path), "COLOUR": "red"})
    assert ask("import os; print(os.environ['COLOUR'])") == "red"
    assert ask("print('OF_THE_SERVER' in os.environ)") == "False"
    assert ask("import only_here; print(only_here.value)") == "7"
    assert "COLOUR" not in os.environ
