"""The command line: in comes argv, out go an exit code and text for people (or JSON).

    argv → argv.py      every spelling becomes --name=value; unknown flags get a "did you mean"
         → main.py      dispatch by the table in flags.py; typer writes the help from the same table
         → sources.py / config_file.py     flag > XSERVE_<FLAG> > --config FILE > default
         → launch_config.py / values.py    checked: a `LaunchConfig`, with the origin of each setting
         → launch.py (launch, plan), doctor.py + checks.py (doctor), instance.py (status, stop)
    errors → report.py  exit codes and the order of a failure's story

screen.py shows a start; the supervisor calls it through the interface it defines itself.

Always true: a mistake in the command line is one line on stderr that names the flag, the value and what to write
instead, exit 2, and nothing has been started. `xserve --help` imports no torch, zmq, transformers or rich. An API key
is never printed. Data goes to stdout, everything else to stderr.
"""
