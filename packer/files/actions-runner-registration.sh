#!/usr/bin/env bash
# Fetches the just-in-time configuration of the runner with the instance's role, and removes it there: it registers one runner for
# one job (GitHub REST API, "Create configuration for a just-in-time runner"). Its folder is the unit's, which root alone can read.
#
# JIT_CONFIGURATION_PARAMETER (a SecureString of Systems Manager) or JIT_CONFIGURATION_SECRET (of Secrets Manager) come from
# /etc/gpu-bringup/actions-runner.conf, which user data writes.
set -euo pipefail

parameter=${JIT_CONFIGURATION_PARAMETER:-}
secret=${JIT_CONFIGURATION_SECRET:-}
folder=${RUNTIME_DIRECTORY:?}
metadata=http://169.254.169.254/latest

if [ -n "$parameter" ] && [ -n "$secret" ] || [ -z "$parameter$secret" ]; then
  echo "/etc/gpu-bringup/actions-runner.conf must name either JIT_CONFIGURATION_PARAMETER or JIT_CONFIGURATION_SECRET" >&2
  exit 1
fi

token=$(curl --fail --silent --show-error --max-time 10 --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$metadata/api/token")
from_metadata() {
  curl --fail --silent --show-error --max-time 10 --header "X-aws-ec2-metadata-token: $token" "$metadata/$1"
}
region=$(from_metadata meta-data/placement/region)
domain=$(from_metadata meta-data/services/domain)
role=$(from_metadata meta-data/iam/security-credentials/)
credentials=$(from_metadata "meta-data/iam/security-credentials/$role")

# call SERVICE TARGET JSON: a request signed with the role's credentials, which no process list shows.
call() {
  jq --raw-output '"user = \"\(.AccessKeyId):\(.SecretAccessKey)\"\nheader = \"X-Amz-Security-Token: \(.Token)\""' <<<"$credentials" |
    curl --config - --aws-sigv4 "aws:amz:$region:$1" --proto '=https' --fail-with-body --silent --show-error --max-time 30 --retry 3 \
      --header 'Content-Type: application/x-amz-json-1.1' --header "X-Amz-Target: $2" --data "$3" "https://$1.$region.$domain/"
}

if [ -n "$parameter" ]; then
  answer=$(call ssm AmazonSSM.GetParameter "$(jq --null-input --arg name "$parameter" '{Name: $name, WithDecryption: true}')")
  configuration=$(jq --raw-output '.Parameter.Value // empty' <<<"$answer")
else
  answer=$(call secretsmanager secretsmanager.GetSecretValue "$(jq --null-input --arg id "$secret" '{SecretId: $id}')")
  configuration=$(jq --raw-output '.SecretString // empty' <<<"$answer")
fi
if ! [[ "$configuration" =~ ^[A-Za-z0-9+/=]+$ ]]; then
  echo "${parameter:-$secret} holds no encoded just-in-time configuration" >&2
  exit 1
fi
# Another instance must not register with it. A role that may not remove it leaves a configuration that GitHub refuses the second time.
if [ -n "$parameter" ]; then
  call ssm AmazonSSM.DeleteParameter "$(jq --null-input --arg name "$parameter" '{Name: $name}')" >/dev/null ||
    echo "$parameter could not be deleted" >&2
else
  call secretsmanager secretsmanager.DeleteSecret "$(jq --null-input --arg id "$secret" '{SecretId: $id, ForceDeleteWithoutRecovery: true}')" >/dev/null ||
    echo "$secret could not be deleted" >&2
fi
printf '%s' "$configuration" >"$folder/jit-configuration"
