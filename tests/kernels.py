"""Kernels that fork from a process which has imported the libraries already.

Each notebook is tested in a kernel of its own.  A kernel needs about four
seconds to import torch, matplotlib and transformers, and there are forty
notebooks.  `KernelServer` imports them once and forks for each kernel: the
kernel is a new process, in which nothing of `tformer` has been imported.
"""

import contextlib
import gc
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "TFORMER_KERNEL_SERVER"  # the variable that names its socket
LIBRARIES = (
    "numpy",
    "torch",
    "matplotlib.pyplot",
    "einops",
    "jaxtyping",
    "regex",
    "tqdm.auto",
    "safetensors.torch",
    "IPython.display",
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "matplotlib_inline.config",
    # with these, transformers imports what all its models need
    "transformers:GPT2LMHeadModel",
    "transformers:LlamaForCausalLM",
    "transformers:BertModel",
)
INLINE = "module://matplotlib_inline.backend_inline"


class KernelServer:
    """A process that forks kernels, until it is closed.

    `libraries` are names as `pkgutil.resolve_name` reads them.
    """

    def __init__(self, libraries=LIBRARIES):
        self.folder = tempfile.TemporaryDirectory(prefix="kernels")
        self.address = str(Path(self.folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)  # who comes early waits
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), *libraries],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[listener.fileno()],
                env=os.environ | {"MPLBACKEND": INLINE},
            )

    def close(self):
        "End the server; its kernels see that and end, too."
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


class ForkedKernel:
    """A kernel's process, with those methods of `subprocess.Popen` that count.

    The kernel holds one end of a connection until it ends, whatever ends it.
    """

    stdin = stdout = stderr = None

    def __init__(self, connection, pid):
        self.connection = connection
        self.pid = pid
        self.returncode = None

    def wait(self, timeout=None):
        if self.returncode is None:
            self.connection.settimeout(timeout)
            try:
                ended = self.connection.recv(1) == b""
            except ConnectionError:
                ended = True
            except TimeoutError:
                raise subprocess.TimeoutExpired("a kernel", timeout) from None
            if ended:
                self.connection.close()
                self.returncode = 0
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0.001)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def launch(command, cwd=None, env=None, **_):
    """Return a kernel forked by the server that the environment names.

    Takes what `jupyter_client.launcher.launch_kernel` takes.  The kernel's
    standard streams lead nowhere.
    """
    *_, module, option, connection_file = command
    if (module, option) != ("ipykernel_launcher", "-f"):
        raise ValueError(
            f"cannot fork {command}: expected the command "
            "python -m ipykernel_launcher -f FILE"
        )
    env = os.environ if env is None else env
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[ADDRESS])
    request = {"file": connection_file, "cwd": cwd or os.getcwd(), "env": dict(env)}
    with connection.makefile("rw", encoding="utf-8") as stream:
        stream.write(json.dumps(request) + "\n")
        stream.flush()
        pid = int(stream.readline())
    return ForkedKernel(connection, pid)


def import_libraries(names):
    "Import libraries, and what else a kernel would have to do each time."
    for name in names:
        pkgutil.resolve_name(name)
    gc.collect()
    gc.freeze()  # a kernel's collections need not look at all this


def run_kernel(request, connection):
    "Become the kernel that a request describes; this does not return."
    server = os.getppid()
    os.setsid()  # signals to its group shall meet the kernel alone
    connection.sendall(f"{os.getpid()}\n".encode())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    asked = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in asked if path and path not in sys.path]
    if "numpy" in sys.modules:  # Python's own generator does that itself
        sys.modules["numpy"].random.seed()
    sys.argv = [
        "ipykernel_launcher",
        "-f",
        request["file"],
        f"--IPKernelApp.parent_handle={server}",
    ]
    runpy.run_module("ipykernel_launcher", run_name="__main__")
    sys.exit()


def serve(listener, libraries):
    "Fork a kernel for each request, until standard input is closed."
    # this file's folder is no place for a notebook's imports
    sys.path.pop(0)
    import_libraries(libraries)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing to bury
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while sys.stdin not in [k.fileobj for k, _ in selector.select()]:
        connection, _ = listener.accept()
        with connection.makefile(encoding="utf-8") as stream:
            request = json.loads(stream.readline())
        if os.fork() == 0:
            selector.close()
            listener.close()
            run_kernel(request, connection)
        connection.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
