#!/usr/bin/env bash
#SBATCH --job-name=lockstep
#SBATCH --nodes=2
#SBATCH --signal=TERM@180
#SBATCH --requeue --open-mode=append
# One training on the machines of a Slurm job, from the folder of params.yaml: sbatch deploy/slurm.sh [lead's arguments, or dvc repro]
# Options go before the name and replace those above: sbatch --nodes=4 --gpus-per-node=8 --time=4:00:00 deploy/slurm.sh
# As an array, every line of a file is an experiment: EXPERIMENTS=FILE sbatch --array=1-3 deploy/slurm.sh, with lines such as
#   -S train.learning_rate=0.05
# MLFLOW_TRACKING_URI names one server for all of them.
#
# --signal without B: reaches the tasks and not this shell: 180 s before the time limit they save and end with 75.
# Exit codes (docs/exit-codes.md): 75 is requeued here; 2, 3 and 5 would fail again; 4 and 6 may pass on another node: --exclude=NODE.
# Whoever cancels the job ends this shell as well, so it is not requeued.
set -u
if [[ -f .venv/bin/activate ]]; then
  # shellcheck disable=SC1091
  source .venv/bin/activate
fi
[[ $# -gt 0 ]] || set -- dvc repro
if [[ -n ${SLURM_ARRAY_TASK_ID:-} && -n ${EXPERIMENTS:-} ]]; then
  [[ -r $EXPERIMENTS ]] || { echo "$EXPERIMENTS: cannot be read; EXPERIMENTS names a file with an experiment a line" >&2; exit 2; }
  read -ra changes < <(sed -n "${SLURM_ARRAY_TASK_ID}p" "$EXPERIMENTS")
  if [[ ${#changes[@]} == 0 ]]; then
    echo "$EXPERIMENTS: has no line $SLURM_ARRAY_TASK_ID; see --array" >&2
    exit 2
  fi
  # DVC locks a whole checkout, and git's objects: each has a clone of the last commit, and they share DVC's cache.
  tree=$PWD-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID cache=$(dvc cache dir)
  [[ -e $tree/.git ]] || git clone --quiet --shared . "$tree" || exit 4
  cd "$tree" && dvc cache dir --local "$cache" || exit 4
  set -- dvc exp run "${changes[@]}"
fi
# The first machine, where this shell runs and the first task too; the tasks know the rest of their places from Slurm.
export PET_MASTER_ADDR="${PET_MASTER_ADDR:-$(hostname)}"
# Slurm 22.05 to 23.02: srun does not take it from sbatch.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# What the leader ends with: srun's code is the highest of all tasks, and a worker may be killed.
LOCKSTEP_EXIT_FILE=$(mktemp) && export LOCKSTEP_EXIT_FILE
# One task a node, which is said here: told so itself, a job of --nodes=2-4 would never get more than two. 75 is no reason to kill those
# that still save.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 python -m pipeline lead "$@"
code=$?
[[ ! -s $LOCKSTEP_EXIT_FILE ]] || read -r code < "$LOCKSTEP_EXIT_FILE"
rm -f "$LOCKSTEP_EXIT_FILE"
if [[ $code == 0 && -n ${tree:-} ]]; then
  # For `dvc exp show` where the job was submitted.
  dvc exp push --quiet --no-cache --all-commits origin
fi
# Stopped and saved: again, on whatever machines there are then. A site with RequeueExit=75 does so by itself.
if [[ $code == 75 && ${SLURM_RESTART_COUNT:-0} -lt ${MAX_REQUEUES:-100} ]]; then
  # One task of an array has the number of all of it.
  scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
