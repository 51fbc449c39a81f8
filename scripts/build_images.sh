#!/usr/bin/env bash
# Builds ling-operator and ling-trainer from Dockerfile; `make images` runs it. Environment:
#   BUILDER      docker, podman or buildah, with options; default: the first of them that works
#   BUILD_FLAGS  further options of its `build`, for example -v /etc/pip.conf:/etc/pip.conf:ro
#   TARGETS      default: operator trainer
#   BASE         base image, a Debian with Python 3.12 or newer; default: the Dockerfile's
#   EXTRA        tpu (default), or empty for a trainer on CPUs
#   REPOSITORY   what stands before the names, for example europe-docker.pkg.dev/p/r/; default: nothing
#   TAG          default: the version in pyproject.toml
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || revision+=-dirty

works() {
  case $1 in
    docker) docker version >/dev/null 2>&1 ;; # asks the daemon too
    *) command -v "$1" >/dev/null ;;
  esac
}

if [[ -z ${BUILDER:-} ]]; then
  for candidate in docker podman buildah; do
    if works "$candidate"; then
      BUILDER=$candidate
      break
    fi
  done
fi
if [[ -z ${BUILDER:-} ]]; then
  printf 'error: images are built by docker, podman or buildah, and none of them works here%s.\n%s\n' \
    "$(command -v docker >/dev/null && echo ' (docker does not reach its daemon)')" \
    'Start docker, or install one of them: apt-get install -y buildah' >&2
  exit 1
fi

read -ra builder <<<"$BUILDER"
read -ra flags <<<"${BUILD_FLAGS:-}"
read -ra targets <<<"${TARGETS:-operator trainer}"
[[ -z ${BASE:-} ]] || flags+=(--build-arg "BASE=$BASE")
for target in "${targets[@]}"; do
  image=${REPOSITORY:-}ling-$target:${TAG:-$version}
  printf '==> %s (%s)\n' "$image" "$BUILDER"
  own=()
  [[ $target != trainer ]] || own+=(--build-arg "EXTRA=${EXTRA-tpu}")
  "${builder[@]}" build --target "$target" --tag "$image" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" "${own[@]}" "${flags[@]}" .
done
