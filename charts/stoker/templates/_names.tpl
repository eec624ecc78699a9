{{- define "stoker.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* The name of what is the cluster's: two releases in two namespaces never share it. */}}
{{- define "stoker.clusterName" -}}
{{- .Release.Namespace }}-{{ include "stoker.name" . -}}
{{- end -}}

{{- define "stoker.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "stoker.name" .) -}}
{{- end -}}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: stoker-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: stoker
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "stoker.activator" -}}
{{- printf "%s-activator" (include "stoker.name" .) -}}
{{- end -}}

{{- define "stoker.activatorSelector" -}}
app.kubernetes.io/name: stoker-activator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stoker.activatorLabels" -}}
{{ include "stoker.activatorSelector" . }}
app.kubernetes.io/component: activator
app.kubernetes.io/part-of: stoker
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "stoker.nodeCache" -}}
{{- printf "%s-node-cache" (include "stoker.name" .) -}}
{{- end -}}

{{- define "stoker.nodeCacheSelector" -}}
app.kubernetes.io/name: stoker-node-cache
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stoker.nodeCacheLabels" -}}
{{ include "stoker.nodeCacheSelector" . }}
app.kubernetes.io/component: node-cache
app.kubernetes.io/part-of: stoker
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "stoker.gateway" -}}
{{- printf "%s-gateway" (include "stoker.name" .) -}}
{{- end -}}

{{- define "stoker.gatewaySelector" -}}
app.kubernetes.io/name: stoker-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stoker.gatewayLabels" -}}
{{ include "stoker.gatewaySelector" . }}
app.kubernetes.io/component: gateway
app.kubernetes.io/part-of: stoker
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "stoker.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* An image as image.registry has it: that in the place of the image's own registry. Takes the root and the image's name. */}}
{{- define "stoker.mirrored" -}}
{{- $root := index . 0 -}}{{- $parts := splitList "/" (index . 1) -}}
{{- $named := and (gt (len $parts) 1) (or (contains "." (first $parts)) (contains ":" (first $parts)) (eq (first $parts) "localhost")) -}}
{{- if not $root.Values.image.registry -}}
{{- index . 1 -}}
{{- else -}}
{{- $root.Values.image.registry }}/{{ join "/" (ternary (rest $parts) $parts $named) -}}
{{- end -}}
{{- end -}}

{{- define "stoker.runtimeImage" -}}
{{- include "stoker.mirrored" (list . .Values.runtime.image) -}}
{{- end -}}

{{- define "stoker.image" -}}
{{- $repository := include "stoker.mirrored" (list . .Values.image.repository) -}}
{{- if .Values.image.digest -}}
{{- $repository }}@{{ .Values.image.digest -}}
{{- else -}}
{{- $repository }}:{{ .Values.image.tag | default .Chart.AppVersion -}}
{{- end -}}
{{- end -}}

{{/* "true" where each namespace has users of its own. */}}
{{- define "stoker.openshift" -}}
{{- if or (eq .Values.openshift "On") (and (eq .Values.openshift "Auto") (.Capabilities.APIVersions.Has "security.openshift.io/v1")) -}}true{{- end -}}
{{- end -}}

{{/* "true" where the custom metrics API is served. */}}
{{- define "stoker.adapter" -}}
{{- if or (eq .Values.metricsAdapter.mode "On") (and (eq .Values.metricsAdapter.mode "Auto") (not .Values.watchNamespaces)) -}}true{{- end -}}
{{- end -}}

{{- define "stoker.adapterService" -}}
{{- printf "%s-metrics-api" (include "stoker.name" .) -}}
{{- end -}}

{{- define "stoker.adapterSecret" -}}
{{- .Values.metricsAdapter.tls.secretName | default (printf "%s-metrics-api-cert" (include "stoker.name" .)) -}}
{{- end -}}

{{/* "true" where the operator makes the custom metrics API's certificate itself. */}}
{{- define "stoker.issues" -}}
{{- if not (or .Values.metricsAdapter.tls.secretName .Values.metricsAdapter.tls.issuerRef) -}}true{{- end -}}
{{- end -}}

{{/* Kinds that services may not ask for, as the operator is told of them. */}}
{{- define "stoker.without" -}}
{{- $off := list -}}
{{- $of := dict "horizontalPodAutoscaler" "HorizontalPodAutoscaler" "keda" "ScaledObject" "ingress" "Ingress" "gatewayApi" "HTTPRoute" "inferencePool" "InferencePool" "prometheusOperator" "PodMonitor,PrometheusRule" "leaderWorkerSet" "LeaderWorkerSet" "dashboards" "Dashboard" "adapters" "AdapterList" -}}
{{- range $feature, $kinds := $of -}}
{{- if not (index $.Values.features $feature) }}{{ $off = append $off $kinds }}{{ end -}}
{{- end -}}
{{- join "," $off -}}
{{- end -}}
