# shellcheck shell=sh disable=SC2086 # $sudo is empty or two words
# Makes the temporary folder on the judged machine, prints its path, and keeps it for as long as somebody listens.
# stdin: "." every few seconds says that the caller is alive, "s" asks the validator to stop; the end of stdin, silence
# or a signal ends the validator and removes the folder. No single quotes here: the whole text travels between two.
sudo=$1
umask 077
[ "$(id -u)" = 0 ] && sudo=
if [ -n "$sudo" ] && ! $sudo true; then
  echo "$(id -un) cannot use sudo without a password there; allow it, connect as root, or leave --sudo out" >&2
  exit 66
fi

# Some images mount /tmp noexec, so each place is tried with a small script.
folder=
for parent in "${TMPDIR:-/tmp}" /var/tmp "$HOME"; do
  folder=$(mktemp -d "$parent/gpu-validator.XXXXXXXXXX" 2>/dev/null) || { folder=; continue; }
  probe=$folder/may-execute
  printf "#!/bin/sh\nexit 0\n" >"$probe" && chmod 700 "$probe" && "$probe" 2>/dev/null && break
  rm -rf -- "$folder"
  folder=
done
if [ -z "$folder" ]; then
  echo "no folder for an executable: ${TMPDIR:-/tmp}, /var/tmp and $HOME are not writable, full, or mounted noexec" >&2
  exit 65
fi
folder=$(cd -- "$folder" && pwd -P)

# The process id is only trusted while that process works in our folder.
validator_runs() {
  [ -s "$folder/pid" ] && validator=$(cat "$folder/pid") &&
    [ "$($sudo readlink "/proc/$validator/cwd" 2>/dev/null)" = "$folder" ]
}

finish() {
  trap "" HUP INT TERM PIPE
  if validator_runs; then
    $sudo kill -TERM "$validator"
    waited=0
    while validator_runs && [ "$waited" -lt 50 ]; do
      sleep 0.2
      waited=$((waited + 1))
    done
    validator_runs && $sudo kill -KILL "$validator"
  fi
  cd / && $sudo rm -rf -- "$folder"
  [ -e "$folder" ] && exit 64
  exit 0
}

trap finish EXIT
trap "exit 0" HUP INT TERM PIPE
mkdir "$folder/reports" "$folder/profile"
printf "%s\n" "$folder"
while byte=$(timeout 60 dd bs=1 count=1 2>/dev/null); do
  case "$byte" in
  .) ;;
  s) validator_runs && $sudo kill -TERM "$validator" ;;
  *) break ;;
  esac
done
