{{- define "ling-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The release's name, with the chart's where it lacks it. */}}
{{- define "ling-operator.fullname" -}}
{{- $name := include "ling-operator.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "ling-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ling-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ling-operator.labels" -}}
{{ include "ling-operator.selectorLabels" . }}
{{ include "ling-operator.commonLabels" . }}
{{- end }}

{{/* Without the selector's, for what is no part of the operator's pods. */}}
{{- define "ling-operator.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ling-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "ling-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is empty: with serviceAccount.create=false name the account to use" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "ling-operator.image" -}}
{{- $image := .Values.image }}
{{- $repository := required "image.repository is empty: set it to where you pushed the operator's image (`make images` builds it)" $image.repository }}
{{- if $image.digest }}
{{- printf "%s@%s" $repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .Chart.AppVersion $image.tag) }}
{{- end }}
{{- end }}

{{/* Annotations and labels of the CRD. */}}
{{- define "ling-operator.crdMetadata" -}}
{{- if not (or .Values.crds.keep .Values.crds.iAcceptDeletion) }}
{{- fail "crds.keep is false: uninstalling would delete the CRD and with it every TrainingRun of the cluster, their JobSets and pods; set crds.iAcceptDeletion=true as well if that is wanted" }}
{{- end }}
{{- if .Values.crds.keep }}
annotations:
  helm.sh/resource-policy: keep
{{- end }}
labels:
  {{- include "ling-operator.labels" . | nindent 2 }}
{{- end }}

{{/* The text of a rule file, its links to the runbook as published. */}}
{{- define "ling-operator.ruleFile" -}}
{{- $text := .root.Files.Get .path }}
{{- with .root.Values.monitoring.runbookUrl }}
{{- $text = replace "docs/operations.md#" (printf "%s#" .) $text }}
{{- end }}
{{- $text }}
{{- end }}
