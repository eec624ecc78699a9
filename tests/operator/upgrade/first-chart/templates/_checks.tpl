{{/* What no schema can say. Included where the images are used. */}}
{{- define "stoker.checks" -}}
{{- $how := "no registry serves Stoker's images. Build and push both, then name them (docs/deploy.md):\n\n  docker build -f images/operator.Dockerfile -t REGISTRY/stoker-operator:VERSION . && docker push REGISTRY/stoker-operator:VERSION\n  docker build -f images/runtime.Dockerfile -t REGISTRY/stoker-runtime:VERSION . && docker push REGISTRY/stoker-runtime:VERSION\n  helm install … --set image.repository=REGISTRY/stoker-operator --set runtime.image=REGISTRY/stoker-runtime:VERSION\n" | replace "VERSION" .Chart.AppVersion -}}
{{- if not .Values.image.repository }}{{ fail (printf "image.repository is empty: %s" $how) }}{{ end -}}
{{- if not .Values.runtime.image }}{{ fail (printf "runtime.image is empty: %s" $how) }}{{ end -}}
{{- if eq (include "stoker.repository" .Values.runtime.image) .Values.image.repository -}}
{{- fail (printf "runtime.image is %s, the operator's own image: it holds no engine. Name the one built from images/runtime.Dockerfile" .Values.runtime.image) -}}
{{- end -}}
{{- if and .Values.watchNamespaces .Values.excludeNamespaces -}}
{{- fail "excludeNamespaces is for where the whole cluster is watched: leave those names out of watchNamespaces" -}}
{{- end -}}
{{- with .Values.metricsAdapter.tls -}}
{{- if and .secretName .issuerRef }}{{ fail "metricsAdapter.tls: give one of secretName and issuerRef" }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* An image's name without tag and digest. */}}
{{- define "stoker.repository" -}}
{{- regexReplaceAll ":[^/]*$" (regexReplaceAll "@.*$" . "") "" -}}
{{- end -}}
