"""``python -m hpcrl.rollouts``: the orchestrator role."""

from hpcrl.rollouts.process import main
from hpcrl.runs.role import run_role

if __name__ == "__main__":
    run_role(main)
