{{/* Base of all object names: at most 40 characters, so that suffixes fit. */}}
{{- define "tinkercloud.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tinkercloud.api.name" -}}{{ include "tinkercloud.fullname" . }}-api{{- end -}}
{{- define "tinkercloud.operator.name" -}}{{ include "tinkercloud.fullname" . }}-operator{{- end -}}
{{- define "tinkercloud.session.name" -}}{{ include "tinkercloud.fullname" . }}-session{{- end -}}

{{- define "tinkercloud.api.serviceAccount" -}}
{{- .Values.apiServer.serviceAccount.name | default (include "tinkercloud.api.name" .) -}}
{{- end -}}
{{- define "tinkercloud.operator.serviceAccount" -}}
{{- .Values.operator.serviceAccount.name | default (include "tinkercloud.operator.name" .) -}}
{{- end -}}
{{- define "tinkercloud.session.serviceAccount" -}}
{{- .Values.sessions.serviceAccount.name | default (include "tinkercloud.session.name" .) -}}
{{- end -}}

{{- define "tinkercloud.bootstrapKey.secret" -}}
{{- .Values.apiServer.bootstrapKey.existingSecret | default (printf "%s-bootstrap-key" (include "tinkercloud.fullname" .)) -}}
{{- end -}}
{{- define "tinkercloud.database.claim" -}}
{{- .Values.database.volume.existingClaim | default (printf "%s-catalog" (include "tinkercloud.fullname" .)) -}}
{{- end -}}

{{/* Claim for the checkpoints; empty if they are in an object store. */}}
{{- define "tinkercloud.checkpoints.claim" -}}
{{- if hasPrefix "file://" .Values.checkpoints.root -}}
{{- .Values.checkpoints.volume.existingClaim | default (printf "%s-checkpoints" (include "tinkercloud.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{/* Labels of an object. Takes the root context and a component: (list . "api"). */}}
{{- define "tinkercloud.labels" -}}
{{- $root := index . 0 -}}
{{- $ours := dict
  "app.kubernetes.io/part-of" "tinkercloud"
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_")
-}}
{{- toYaml (merge (include "tinkercloud.selector" . | fromYaml) $ours $root.Values.commonLabels) -}}
{{- end -}}

{{/* Labels of a pod with additional labels: (list . "api" .Values...podLabels). */}}
{{- define "tinkercloud.podLabels" -}}
{{- toYaml (merge (include "tinkercloud.labels" . | fromYaml) (index . 2)) -}}
{{- end -}}

{{/* Labels of an object that other programs select by their own labels, which win: (list . "api" .Values...labels). */}}
{{- define "tinkercloud.foundLabels" -}}
{{- toYaml (merge (deepCopy (index . 2)) (include "tinkercloud.labels" . | fromYaml)) -}}
{{- end -}}

{{/* Labels that never change, by which pods are selected. */}}
{{- define "tinkercloud.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}
