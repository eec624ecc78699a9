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

{{- define "stoker.image" -}}
{{- if .Values.image.digest -}}
{{- .Values.image.repository }}@{{ .Values.image.digest -}}
{{- else -}}
{{- .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion -}}
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
{{- $of := dict "horizontalPodAutoscaler" "HorizontalPodAutoscaler" "keda" "ScaledObject" "ingress" "Ingress" "gatewayApi" "HTTPRoute" "prometheusOperator" "PodMonitor,PrometheusRule" "dashboards" "ConfigMap" -}}
{{- range $feature, $kinds := $of -}}
{{- if not (index $.Values.features $feature) }}{{ $off = append $off $kinds }}{{ end -}}
{{- end -}}
{{- join "," $off -}}
{{- end -}}
