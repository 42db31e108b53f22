{{- /* A digest wins over the tag; without either it is the chart's own version. */ -}}
{{- define "gpu-validator.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}:{{ $tag }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}
{{- end -}}

{{- /* A changed profile has another name, so that the gate starts anew. */ -}}
{{- define "gpu-validator.profile" -}}
gpu-validator-profile-{{ .Values.profile | sha256sum | trunc 10 }}
{{- end -}}
