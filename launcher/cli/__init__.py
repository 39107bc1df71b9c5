"""The command line: in comes argv, out go an exit code and text for people (or JSON).

    argv → argv.py      every spelling becomes --name=value; unknown flags get a "did you mean"
         → main.py      typer: help and dispatch; parameters come from the table in flags.py, all as text
         → launch_config.py / values.py    flag > XSERVE_<FLAG> > default, checked: a `LaunchConfig`
         → launch.py (launch, plan), instance.py (status, stop)
    errors → report.py  exit codes and the order of a failure's story

screen.py shows a start; the supervisor calls it through the interface it defines itself.

Always true: a mistake in the command line is one line on stderr that names the flag, the value and what to write
instead, exit 2, and nothing has been started. `xserve --help` imports no torch, zmq, transformers or rich. An API key
is never printed. Data goes to stdout, everything else to stderr.
"""
