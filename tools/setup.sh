#!/bin/sh
# Installs what building needs: the Debian packages of apt-packages.txt and a virtual environment .venv with the pinned
# packages of requirements.txt. What is there already is skipped. PYTHON chooses the Python that .venv is made with.
set -eu
cd "$(dirname "$0")/.."

missing_packages() {
  sed -e 's/#.*//' apt-packages.txt | while read -r package; do
    [ -n "$package" ] || continue
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$' || printf '%s ' "$package"
  done
}

install_packages() {
  command -v dpkg-query >/dev/null || {
    echo "setup: this is not a Debian system; install the counterparts of apt-packages.txt yourself." >&2
    return 0
  }
  missing=$(missing_packages)
  [ -n "$missing" ] || { echo "setup: Debian packages: all there"; return 0; }
  started=$(date +%s)
  echo "setup: Debian packages to install (about 20 s): $missing"
  as_root=
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
      echo "setup: error: run this as root (there is no sudo): apt-get install $missing" >&2
      exit 1
    }
    as_root=sudo
  fi
  $as_root apt-get update -qq
  # The list is split into words on purpose.
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
  echo "setup: Debian packages: installed in $(($(date +%s) - started)) s"
}

install_python() {
  stamp=.venv/requirements.sha256
  wanted=$(sha256sum requirements.txt | cut -d ' ' -f 1)
  if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "setup: Python packages: all there (.venv)"
    return 0
  fi
  started=$(date +%s)
  echo "setup: Python packages into .venv: PyTorch is 4.9 GB installed, this takes 3 minutes or more"
  # A virtual environment whose Python is gone is made anew.
  .venv/bin/python -c '' 2>/dev/null || "${PYTHON:-python3}" -m venv --clear .venv
  rm -f "$stamp"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
  echo "$wanted" >"$stamp"
  echo "setup: Python packages: installed in $(($(date +%s) - started)) s"
}

install_packages
install_python
