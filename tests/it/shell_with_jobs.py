"""A shell with job control, on a terminal of its own: PROGRAM [ARGUMENT...] is its foreground job.

A line `ctrl-z` on standard input is typed as Ctrl-Z, `fg` continues the job. Its process id and
`stopped` come on standard output. The exit status is that of the job."""

import os
import pty
import signal
import sys
import threading

report, messages = os.pipe()
shell, terminal = pty.fork()
if shell == 0:
    os.close(report)
    # A shell may set the foreground job of its terminal from anywhere.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    job = os.fork()
    if job == 0:
        os.close(messages)
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.execv(sys.argv[1], sys.argv[1:])
    os.write(messages, b"%d\n" % job)
    while True:
        _, status = os.waitpid(job, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            os._exit(os.waitstatus_to_exitcode(status) & 255)
        os.write(messages, b"stopped\n")
os.close(messages)


def drain():
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        # The terminal was hung up.
        pass


threading.Thread(target=drain, daemon=True).start()
lines = os.fdopen(report)
job = int(lines.readline())
print(job, flush=True)


def follow():
    for line in lines:
        print(line, end="", flush=True)


threading.Thread(target=follow, daemon=True).start()


def obey():
    for line in sys.stdin:
        if line.strip() == "ctrl-z":
            os.write(terminal, b"\x1a")
        elif line.strip() == "fg":
            os.killpg(job, signal.SIGCONT)


threading.Thread(target=obey, daemon=True).start()
_, status = os.waitpid(shell, 0)
sys.exit(os.waitstatus_to_exitcode(status))
