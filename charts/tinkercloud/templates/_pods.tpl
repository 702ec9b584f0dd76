{{/* A full image name. Takes the root context and an image: (list . .Values.apiServer.image). */}}
{{- define "tinkercloud.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $repository := join "/" (compact (list $root.Values.image.registry $image.repository)) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest | quote -}}
{{- else -}}
{{- printf "%s:%s" $repository (coalesce $image.tag $root.Values.image.tag $root.Chart.AppVersion) | quote -}}
{{- end -}}
{{- end -}}

{{/* Settings that all pods of the chart share. */}}
{{- define "tinkercloud.pod" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
# Service links of a Service named tinkercloud would set TINKERCLOUD_PORT, which is a setting.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with .Values.podSecurity.runAsUser }}
  runAsUser: {{ int64 . }}
  runAsGroup: {{ int64 . }}
  {{- end }}
  {{- with .Values.podSecurity.fsGroup }}
  fsGroup: {{ int64 . }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "tinkercloud.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where pods run. Takes the root context, a component and its values. */}}
{{- define "tinkercloud.scheduling" -}}
{{- $scheduling := index . 2 -}}
{{- with $scheduling.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $scheduling.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $scheduling.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $ours := dict "labelSelector" (dict "matchLabels" (include "tinkercloud.selector" $ | fromYaml)) }}
  - {{- toYaml (ternary . (merge (deepCopy .) $ours) (hasKey . "labelSelector")) | nindent 4 }}
  {{- end }}
{{- end }}
{{- with $scheduling.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
affinity:
{{- if $scheduling.affinity }}
  {{- toYaml $scheduling.affinity | nindent 2 }}
{{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "tinkercloud.selector" . | nindent 14 }}
{{- end }}
{{- end -}}

{{/* A container's environment. Takes the field's name, the chart's variables (YAML of a list) and the user's variables. */}}
{{- define "tinkercloud.environment" -}}
{{- $field := index . 0 -}}
{{- $ours := index . 1 -}}
{{- $names := list -}}
{{- range fromYamlArray $ours }}{{ $names = append $names .name }}{{ end -}}
{{ $ours }}
{{- range $name, $value := index . 2 }}
{{- if has $name $names }}
{{- fail (printf "%s: %s is already set by the chart from another value; remove it from %s" $field $name $field) }}
{{- end }}
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Refuses items of a value whose key the chart, or an earlier item, has already. Takes the field's name, a word for its
     items, the key, the taken values and the items. */}}
{{- define "tinkercloud.distinct" -}}
{{- $field := index . 0 -}}
{{- $what := index . 1 -}}
{{- $key := index . 2 -}}
{{- $taken := index . 3 -}}
{{- range index . 4 -}}
{{- $value := trimSuffix "/" (get . $key) -}}
{{- if has $value $taken -}}
{{- fail (printf "%s: the pod already has a %s with %s %s; choose another %s" $field $what $key $value $key) -}}
{{- end -}}
{{- $taken = append $taken $value -}}
{{- end -}}
{{- end -}}

{{/* Refuses mounts of volumes that do not exist. Takes the field's name, the names of the volumes and the mounts. */}}
{{- define "tinkercloud.mounted" -}}
{{- $field := index . 0 -}}
{{- $volumes := index . 1 -}}
{{- range index . 2 -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "%s: there is no volume %s; add it to apiServer.extraVolumes, or use one of %s" $field .name (join ", " $volumes)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Path of the `caBundle` file, for programs that use OpenSSL, requests or rustls. */}}
{{- define "tinkercloud.caFile" -}}/etc/tinkercloud-ca/{{ .Values.caBundle.key }}{{- end -}}

{{/* A claim. Takes the root context, a component, a name and a volume's values. */}}
{{- define "tinkercloud.claim" -}}
{{- $root := index . 0 -}}
{{- $volume := index . 3 -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ index . 2 | quote }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "tinkercloud.labels" . | nindent 4 }}
  {{- if $volume.retain }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
spec:
  accessModes: {{- toYaml $volume.accessModes | nindent 4 }}
  {{- with $volume.storageClassName }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources:
    requests:
      storage: {{ $volume.size | quote }}
{{- end -}}

{{/* A PodDisruptionBudget. Takes the root context, a component, a name, its values and whether there are several pods. */}}
{{- define "tinkercloud.disruptionBudget" -}}
{{- $root := index . 0 -}}
{{- $budget := index . 3 -}}
{{- if and $budget.enabled (index . 4) }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ index . 2 }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "tinkercloud.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ $budget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "tinkercloud.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* Egress to DNS. OpenShift's DNS pods listen on port 5353, and its network applies policies to Service traffic by
     the pod that receives it. */}}
{{- define "tinkercloud.dnsEgress" -}}
- ports:
    {{- range list 53 5353 }}
    - { protocol: UDP, port: {{ . }} }
    - { protocol: TCP, port: {{ . }} }
    {{- end }}
{{- end -}}

{{/* Egress to DNS and to the Kubernetes API server, which has no labels to select by. */}}
{{- define "tinkercloud.kubernetesEgress" -}}
{{ include "tinkercloud.dnsEgress" . }}
- ports:
    {{- range .Values.networkPolicy.kubernetesPorts }}
    - { protocol: TCP, port: {{ . }} }
    {{- end }}
{{- end -}}

{{/* Egress rules that API server and operator share. */}}
{{- define "tinkercloud.commonEgress" -}}
{{ include "tinkercloud.kubernetesEgress" . }}
- to:
    - podSelector:
        matchExpressions:
          - { key: tinkercloud.dev/session, operator: Exists }
  ports:
    - { protocol: TCP, port: 8000 }
{{- end -}}

{{/* Ingress rule for the metrics of API server and operator. */}}
{{- define "tinkercloud.metricsIngress" -}}
- ports:
    - { protocol: TCP, port: 9090 }
  from: {{- toYaml (.Values.networkPolicy.metricsClients | default (list (dict "namespaceSelector" dict))) | nindent 4 }}
{{- end -}}
